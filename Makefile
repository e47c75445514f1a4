# `make demo` is all a newcomer types: it makes a virtual environment, installs, and opens the dashboard.
# PYTHON, VENV, TORCH and ARGS may be set: make demo PYTHON=python3.12 ARGS="--record run.mcap"

PYTHON ?= python3
VENV ?= .venv
# Without an NVIDIA GPU, this exact requirement: see README, "torch on a machine without a GPU".
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test lint format types imports check snapshots models wheel clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(READY) ## a small model, and its blocks on the screen
	@exec $(BIN)/kvscope demo $(ARGS)

test: $(READY) ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## style and likely mistakes
	$(BIN)/ruff check .

format: $(READY) ## is everything formatted?
	$(BIN)/ruff format --check .

types: $(READY) ## check the types
	$(BIN)/mypy

imports: $(READY) ## who may import whom
	$(BIN)/lint-imports

check: lint format types imports test ## all of the above

snapshots: $(READY) ## write the pictures of tests/dashboard/snapshots anew, to be read before they are committed
	KVSCOPE_SNAPSHOTS=write $(BIN)/python -m pytest -q tests/dashboard/test_snapshots.py

models: $(READY) ## fetch SmolLM2-135M and convert it, for the tests with real weights
	$(BIN)/python tools/fetch_smollm2.py

wheel: $(READY) ## build dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist

clean: ## remove the environment and everything built
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find runtime dashboard kernels tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and alone: a range, asked for together with the rest, may resolve to a build with several GB of CUDA.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "kvscope needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@echo "making $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet '$(TORCH)'
	$(PIP) install --quiet --editable '.[engine]' --group dev
	@touch $@
