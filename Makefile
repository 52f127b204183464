# Two verbs do everything on a machine with Python 3.11 and make: `make run` and `make test`.
# The others: lint, types, soak, phases, remote, deployed, hostile, forms, architectures, tldr, stories and
# fresh-stories (for three seeds each), weeks, year, bench, test-gpu, bench-gpu, docs, screenshots, install, lock,
# audit, clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 1 2 3
LABELS ?= 4000
# vader: the judge's lexicon, with one label in ten wrong; afinn: another one, from the package afinn.
LABELER ?= vader
RUN_ARGS ?=
BENCH_ARGS ?= --results tests/benchmarks/RESULTS.md
TRL_VENV := .venv-trl
AWS_VENV := .venv-aws

TRL_FOLDER := $(TRL_VENV)/wheel

# `make bench-gpu GPU_PYTHON=python3 TRL_WHEEL=trl-1.12.0-py3-none-any.whl` measures with the torch
# and transformers that the machine already has, and with a TRL wheel copied to it.
GPU_PYTHON ?= $(BIN)/python
TRL_WHEEL ?= trl==1.12.0

LOCKS := infra/locks
LOCK ?= $(LOCKS)/dev.txt
LOCK_ARGS ?=
# DeepSpeed is the only package without wheels.
WHEELS := --only-binary :all: --no-binary deepspeed
# uv does not read pip's settings. Without a folder of wheels it takes torch from pytorch.org.
TORCH_CPU := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
IMAGE_EXTRAS := $(addprefix --extra ,deploy evaluation judge peft quantised vllm)
COMPILE = $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate $(WHEELS) $(LOCK_ARGS) \
	--python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock"

.PHONY: run test soak phases remote deployed hostile forms architectures lint types tldr stories fresh-stories weeks year bench test-gpu bench-gpu docs screenshots install lock audit clean

run: $(VENV)/installed ## Run the flow on the built-in task and print the result.
	$(BIN)/python flows/rlhf.py run $(RUN_ARGS)

# In the order of the folders: long files come first. A third process uses the time in which others wait.
test: lint types ## Check style, types and templates; run the tests, three files at a time with one thread each.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

soak: $(VENV)/installed-dev ## The tests that take minutes.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder

phases: $(VENV)/installed-dev ## Every phase with several processes, on another device, killed and hanging.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" -n 2 --dist loadfile \
		tests/ppo_core/supervised tests/flows/launch tests/flows/whole_flow/test_placement.py \
		tests/flows/whole_flow/test_flow_supervised.py tests/flows/whole_flow/test_flow_vllm.py

remote: $(VENV)/installed-dev ## The flow on machines that share nothing: S3, Step Functions, Argo, lost machines.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" -n 2 --dist loadfile --no-loadscope-reorder \
		tests/flows/whole_flow/test_remote.py tests/flows/storage tests/flows/launch/test_checkpoint_mirror.py \
		tests/flows/launch/test_spot_notice.py tests/flows/stages/test_sft_and_reward_models.py \
		tests/flows/whole_flow/test_state_machine.py tests/flows/whole_flow/test_graph.py \
		tests/flows/whole_flow/test_argo.py \
		tests/flows/whole_flow/test_code_package.py tests/flows/whole_flow/test_images.py

deployed: $(VENV)/installed-dev $(AWS_VENV)/installed ## Deployments and their weeks, stacks, rights, images, sizes.
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" -n 2 --dist loadfile --no-loadscope-reorder \
		tests/flows/whole_flow/test_weekly_life.py tests/infra tests/flows/deployment tests/flows/retraining \
		tests/flows/test_deploy.py tests/flows/whole_flow/test_code_package.py tests/flows/cost

hostile: $(VENV)/installed-dev ## Hostile and broken inputs, with a table of the cases of each part.
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/hostile -m "slow or not slow" -n 2 --dist loadfile

forms: $(VENV)/installed-dev ## Every form of data through the flow and the commands, with a table.
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/forms -m "slow or not slow" -n 2 --dist load

architectures: $(VENV)/installed-dev ## Every model type of transformers, small, with a table.
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.architectures --results tests/benchmarks/ARCHITECTURES.md

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint infra/Dockerfile.* infra/mlflow/Dockerfile
	$(BIN)/cfn-lint infra/aws/*.yaml

types: $(VENV)/installed-dev
	$(BIN)/mypy

# Run a preset once per seed, and print the figures of all seeds.
tldr stories: $(VENV)/installed-dev
	mkdir -p outputs/$@
	for seed in $(SEEDS); do \
		$(BIN)/python flows/rlhf.py --config settings flows/presets/$@.toml run \
			--seed $$seed --summary-json outputs/$@/seed-$$seed.json || exit 1; \
	done
	$(BIN)/python tests/helpers/runs/print_runs.py $(SEEDS:%=outputs/$@/seed-%.json)

# The stories with a reward model of LABELS pairs of the policy's own samples, another one for each seed.
fresh-stories: $(VENV)/installed-dev
	[ $(LABELER) != afinn ] || $(BIN)/python -m pip install --quiet afinn==0.1
	mkdir -p outputs/$@
	for seed in $(SEEDS); do \
		PYTHONPATH=. $(BIN)/python flows/rlhf.py --config settings flows/presets/stories.toml run \
			--seed $$seed --set reward_model_training.seed=$$seed --set fresh_pairs.count=$(LABELS) \
			--set fresh_pairs.labeller=python:tests/helpers/$(LABELER)_judge.py:people \
			--set ppo.kl_target=8.0 --set selection.method=kl \
			--summary-json outputs/$@/seed-$$seed.json || exit 1; \
	done
	$(BIN)/python tests/helpers/runs/print_runs.py $(SEEDS:%=outputs/$@/seed-%.json)

weeks: $(VENV)/installed-dev ## Simulated weeks of the gate: false promotions, power, coverage of the intervals; guards.
	PYTHONPATH=.:flows OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.weeks
	PYTHONPATH=.:flows OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.guards

year: $(VENV)/installed-dev ## A simulated year of weekly retraining that no person touches; 70 minutes.
	PYTHONPATH=.:flows OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.year --figure docs/images/year.png

# Ours and TRL 1.12 in turns: two hours and more (measured: 50 minutes for `--pairs 2` and 8 of 17 cases).
# BENCH_ARGS="--cases neox-10m" measures the cases of one model.
bench: $(VENV)/installed-dev $(TRL_VENV)/installed
	$(BIN)/python -m tests.benchmarks $(BENCH_ARGS)

# `make test-gpu GPU_PYTHON=python3` tests with the torch and transformers of the machine.
test-gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),$(VENV)/installed-dev) ## Every phase on CUDA; skipped without a CUDA device.
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest tests/gpu -m "slow or not slow" -rs

# The same as `bench` on CUDA; fails without a CUDA device.
bench-gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),$(VENV)/installed-dev) $(TRL_FOLDER)/trl
	PYTHONPATH=$(TRL_FOLDER) $(GPU_PYTHON) -m tests.benchmarks --gpu --trl-python $(GPU_PYTHON)

docs: $(VENV)/installed-dev ## The site of the documentation, in build/docs; a broken link ends the build.
	PYTHONPATH=.:flows OMP_NUM_THREADS=1 $(BIN)/python -m tests.docs.build_site

screenshots: $(VENV)/installed-dev ## Pictures of the newest run's pages, in docs/images; needs Chromium.
	PYTHONPATH=.:flows $(BIN)/python -m tests.docs.screenshots

# DeepSpeed is built with the setuptools of build.txt, since pip would fetch another one without a hash.
install: | $(VENV)/bin/python ## Install exactly the packages of LOCK, in the place of newer ones.
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: \
		--requirement $(LOCKS)/build.txt
	$(BIN)/python -m pip install --quiet --require-hashes $(WHEELS) --no-build-isolation \
		--use-pep517 --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(VENV)/installed $(if $(filter %dev.txt,$(LOCK)),$(VENV)/installed-dev)

# The packages of the images are a part of the developer's, in the same versions. Without the extra
# lm-eval, which needs a package that has no wheel; `dev` has what the extra docs has.
lock: $(VENV)/installed-dev ## Write the lock files; LOCK_ARGS=--upgrade takes newer releases.
	$(COMPILE) $(TORCH_CPU) $(IMAGE_EXTRAS) --extra dev --python-version 3.11 \
		--output-file $(LOCKS)/dev.txt pyproject.toml
	sed -n 's/^\([^ #]*==[^ +]*\).*/\1/p' $(LOCKS)/dev.txt > $(VENV)/pins.txt
	$(COMPILE) $(TORCH_CPU) $(IMAGE_EXTRAS) --python-version 3.11 --constraint $(VENV)/pins.txt \
		--output-file $(LOCKS)/cpu.txt pyproject.toml
	$(COMPILE) $(IMAGE_EXTRAS) --python-version 3.12 --constraint $(VENV)/pins.txt \
		--output-file $(LOCKS)/cuda.txt pyproject.toml
	$(BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" \
		| $(COMPILE) --python-version 3.11 --constraint $(VENV)/pins.txt \
		--output-file $(LOCKS)/build.txt -

audit: $(VENV)/installed-dev ## Look for known vulnerabilities of the locked packages.
	$(BIN)/python $(LOCKS)/audit.py

clean:
	rm -rf $(VENV) $(TRL_VENV) $(AWS_VENV) build outputs .metaflow mlruns mlflow.db .pytest_cache .ruff_cache .mypy_cache *.egg-info

# Reinstalled only when pyproject.toml changes; the dev extra includes the other installation.
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[evaluation,judge]'
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/installed

$(TRL_VENV)/installed: tests/benchmarks/requirements-trl.txt $(VENV)/installed-dev
	$(PYTHON) -m venv $(TRL_VENV)
	$(BIN)/python -m pip list --format=freeze --exclude-editable > $(TRL_VENV)/ours.txt
	$(TRL_VENV)/bin/python -m pip install --quiet --requirement $< --constraint $(TRL_VENV)/ours.txt
	touch $@

# checkov and awscli, which need another boto3, and IAM Simulate, which needs node and npm.
$(AWS_VENV)/installed: tests/infra/requirements-aws.txt
	$(PYTHON) -m venv $(AWS_VENV)
	$(AWS_VENV)/bin/python -m pip install --quiet --requirement $<
	npm install --silent --no-audit --no-fund --prefix $(AWS_VENV) @cloud-copilot/iam-simulate@0.1.173
	touch $@

$(TRL_FOLDER)/trl:
	$(GPU_PYTHON) -m pip install --quiet --no-deps --target $(TRL_FOLDER) '$(TRL_WHEEL)'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
