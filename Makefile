SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
LATEST := .venv-latest
CUDA := .venv-cuda
RELEASE := .venv-release
FRESH := .venv-fresh
BIN := $(CURDIR)/$(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# One process per core and one thread per process: the tests' tensors are small.  What takes long to make is made in one
# of them, where all tests that read it run (`xdist_group`).
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadgroup
MIRROR := .cache/typecheck
# Of `make fuzz`: how long, which programs, and further options (`make fuzz FUZZ_ARGS=--help`).
SECONDS ?= 600
SEED ?= $(shell date +%j%H%M)
FUZZ_ARGS ?=
# Of `make cuda`: which parts (`make cuda CUDA_ARGS=--help`).
CUDA_ARGS ?=
# Of `make gpu`: any Python that has torch with CUDA, pytest, pytest-xdist and tabulate.
GPU_PYTHON ?= $(BIN)/python

# Inductor's compiled kernels stay here between runs, so that only the first run pays for them.
test test-slow test-fast test-all test-backends test-latest fuzz: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
test test-slow test-fast test-all test-backends test-browser test-latest fuzz: export OMP_NUM_THREADS ?= 1
# Where bytecode is not kept, every process compiles all tests anew before it runs the first one.
test test-slow test-fast test-all test-backends test-browser test-latest: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup test test-slow test-fast test-all test-backends test-browser test-latest fuzz gpu cuda demo bench coverage docs release lint style typecheck format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.stamp  ## make .venv with the pinned development environment

# Runs again only when the pins or the project's own metadata change.
$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,demo,bench,docs]'
	touch $@

test: lint  ## what a change must pass: style, types, the tests that are quick (ten minutes)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m 'not slow and not rest and not browser'

test-slow: setup  ## the tests that take seconds each, which run at every push, too (five minutes)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m 'slow and not rest and not browser'

test-fast: setup  ## the tests without those that are slow or compile with inductor
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m 'not slow and not inductor and not rest and not browser'

test-all: setup  ## all tests, also those marked `rest`: whole long lists, and lists crossed with each other (hours)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m 'not browser'

test-browser: setup  ## the report in headless Chromium, which must be installed
	@$(BIN)/python -m pytest -q -m browser tests/explain

test-backends: setup  ## every row on every backend (about half an hour on two cores)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m '' tests/passes/test_backends.py

test-latest:  ## all tests on the newest torch that pyproject.toml allows, in .venv-latest
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python $(PIP_INSTALL) --upgrade -e '.[dev,demo,bench]' torch
	$(LATEST)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@$(LATEST)/bin/python -m pytest -q $(PYTEST_ARGS)

fuzz: setup  ## random programs against a float64 loop: SECONDS=600 SEED=1 FUZZ_ARGS="--proof --write DIR"
	@PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS) --seed $(SEED) $(FUZZ_ARGS)

gpu:  ## on a machine with a CUDA device: its tests, rates, kernels and times; GPU_PYTHON=python3 where nothing can be installed
	@$(GPU_PYTHON) bench/gpu.py

# A build of torch for CUDA, whatever pip is told to prefer: 4.7 GB, and no driver is needed.
$(CUDA)/.stamp:
	test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT= PIP_FIND_LINKS= $(CUDA)/bin/python $(PIP_INSTALL) torch==2.13.0 triton numpy tabulate setuptools
	PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT= PIP_FIND_LINKS= $(CUDA)/bin/python $(PIP_INSTALL) --no-deps -e .
	touch $@

cuda: $(CUDA)/.stamp  ## without a CUDA device: steps compiled for one, counted, and small ones executed; CUDA_ARGS="--models mlp --again"
	@OMP_NUM_THREADS=1 $(CUDA)/bin/python bench/tile_kernels.py
	@OMP_NUM_THREADS=1 $(CUDA)/bin/python bench/without_cuda.py $(CUDA_ARGS)

demo: setup  ## run the demo
	@$(BIN)/python -m psg_fx.demo

bench: setup  ## run every script in bench/ but coverage and those for CUDA (minutes; results depend on the machine)
	@for script in $(filter-out bench/coverage.py bench/gpu.py bench/kernels.py bench/moved.py bench/weighted_sums.py bench/gram_dots.py bench/tile_kernels.py bench/without_cuda.py,$(wildcard bench/[!_]*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

coverage: setup  ## who answers which program, and rightly: psg_fx and its peers on all suites (an hour or more)
	@$(BIN)/python bench/coverage.py

docs: setup  ## build the documentation into build/site; what mkdocs would warn about is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; to search in it: $(VENV)/bin/python -m http.server -d build/site"

release: ## the wheel and the source archive, checked, and the README's first example with the wheel in a fresh environment
	rm -rf dist $(FRESH)
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(PIP_INSTALL) build==1.6.1 twine==7.0.0
	$(RELEASE)/bin/python -m build --outdir dist >$(RELEASE)/build.log
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python $(PIP_INSTALL) -c constraints.txt dist/*.whl
	cd $(FRESH) && bin/python $(CURDIR)/.ci/quick_start.py

lint: style typecheck  ## check style and types, change nothing

style: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy knows nothing of package-dir, so it is shown a tree of links in the installed shape: psg_fx/ with passes/ inside.
typecheck: setup  ## mypy --strict on psg_fx and psg_fx.passes
	@rm -rf $(MIRROR) && mkdir -p $(MIRROR)/psg_fx
	@ln -s $(CURDIR)/psg_fx/* $(CURDIR)/passes $(MIRROR)/psg_fx/
	cd $(MIRROR) && $(BIN)/mypy --strict --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.cache/mypy -p psg_fx \
	  | sed -E 's|^psg_fx/passes/|passes/|'

format: setup  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove environments, caches and build outputs
	rm -rf $(VENV) $(LATEST) $(CUDA) $(RELEASE) $(FRESH) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find psg_fx passes tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
