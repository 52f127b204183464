# Two verbs do everything on a machine with Python 3.11 and make: `make run` and `make test`.
# The others: lint, types, soak, tldr and stories (both for three seeds), clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 1 2 3
RUN_ARGS ?=

.PHONY: run test soak lint types tldr stories clean

run: $(VENV)/installed ## Run the flow on the built-in task and print the result.
	$(BIN)/python flows/rlhf.py run $(RUN_ARGS)

test: $(VENV)/installed-dev ## Run the suite, two files at a time on one thread each.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

soak: $(VENV)/installed-dev ## The tests that take minutes.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -n 2 --dist loadfile

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint infra/Dockerfile.*

types: $(VENV)/installed-dev
	$(BIN)/mypy

# A preset once a seed, and the figures of all seeds.
tldr stories: $(VENV)/installed-dev
	mkdir -p outputs/$@
	for seed in $(SEEDS); do \
		$(BIN)/python flows/rlhf.py --config settings flows/presets/$@.toml run \
			--seed $$seed --summary-json outputs/$@/seed-$$seed.json || exit 1; \
	done
	$(BIN)/python tests/print_runs.py $(SEEDS:%=outputs/$@/seed-%.json)

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
