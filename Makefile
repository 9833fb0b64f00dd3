# prfaas-bench. `make help` lists the targets; every one sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install bench test lint format clean

help:  ## list the targets
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# torch is installed first and by exact version: a range would bring a CUDA build of several GB.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "prfaas-bench needs Python 3.11 or newer, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[engine,dev]'
	touch $@

# The CPU build where the index serves one under this version; a machine with CUDA may set TORCH.
TORCH ?= torch==2.13.0

install: $(STAMP)  ## create .venv and install everything

bench: $(STAMP)  ## the main job: four configurations on real bytes, about six minutes
	$(BIN)/prfaas run bench

test: $(STAMP)  ## the default test suite, under 8 minutes on two cores
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches; results in runs/ stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
