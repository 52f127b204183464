# Two verbs do everything on a machine with Python 3.11 and make: `make run` and `make test`.
# The others: lint, types, bench, stories, clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STORY_SEEDS ?= 1 2 3
RUN_ARGS ?=

.PHONY: run test lint types bench stories clean

run: $(VENV)/installed ## Run the flow on the built-in task and print the result.
	$(BIN)/python flows/rlhf.py run $(RUN_ARGS)

test: $(VENV)/installed-dev ## Run the suite, two tests at a time on one thread each.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint infra/Dockerfile.*

types: $(VENV)/installed-dev
	$(BIN)/mypy

bench: $(VENV)/installed-dev
	$(BIN)/pytest -m slow tests/benchmarks

# The whole run on real stories, once a seed, and the means over the seeds.
stories: $(VENV)/installed-dev
	mkdir -p outputs/stories
	for seed in $(STORY_SEEDS); do \
		$(BIN)/python flows/rlhf.py --config settings flows/presets/stories.toml run \
			--seed $$seed --summary-json outputs/stories/seed-$$seed.json || exit 1; \
	done
	$(BIN)/python tests/print_stories.py $(STORY_SEEDS:%=outputs/stories/seed-%.json)

clean:
	rm -rf $(VENV) outputs .metaflow mlruns mlflow.db .pytest_cache .ruff_cache .mypy_cache *.egg-info

# Installed anew only when pyproject.toml changes; the dev extra contains everything else.
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
