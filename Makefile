# Everything a newcomer types. Each target sets up what it needs, from a fresh clone.
PYTHON ?= python3
BIN := .venv/bin

# Real MNIST beside the clone, where there is one; else the jobs download it.
ifneq ($(wildcard ../shared/data/mnist),)
export BATCHML_DATA_DIR ?= $(abspath ../shared/data)
endif

# Without bytecode every session of pytest would compile all tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test full slow torture clients check lint types bench gpu help-texts permissions picture wheel clean

demo: .venv/installed  ## LeNet learns handwritten digits, through the embedded AWS Batch
	$(BIN)/batchml submit --wait lenet

PYTEST := $(BIN)/python -m pytest
PARALLEL := -n 3 --dist worksteal

test: .venv/installed-dev  ## five minutes: every rule, the server, and one test of each user journey
	$(PYTEST) $(PARALLEL) -m 'not full and not slow and not clients'

full: .venv/installed-dev .venv-scan/installed
	$(PYTEST) $(PARALLEL) -m 'not slow and not clients'

# Most of these train, on one vCPU each. grep finds their files, because pytest would take longer to
# collect all tests.
slow: .venv/installed-dev .venv-scan/installed
	$(PYTEST) -n 2 --dist worksteal -m slow $$(grep -rl 'mark\.slow' tests --include='test_*.py')

TORTURES := torture server/test_malformed.py server/test_forged.py jobs/test_ignore.py \
  runs/test_submit.py runs/test_watch_world.py runtime/test_transfer.py process/test_torchrun.py \
  e2e/test_resume.py e2e/test_ddp.py e2e/test_nodes_killed.py e2e/test_sweep_detached.py

torture: .venv/installed-dev  ## hours: ten thousand kills, every system call, every bad request
	BATCHML_TORTURE=$${BATCHML_TORTURE:-20} $(PYTEST) -s $(addprefix tests/,$(TORTURES))

CLIENTS := airflow miniwdl torchx

clients: .venv/installed-dev $(CLIENTS:%=.venv-clients/%/installed)  ## AWS Batch clients from PyPI, unmodified
	BATCHML_REQUIRE_CLIENTS=1 $(PYTEST) tests/clients

check: lint types full slow clients  ## what CI runs: every test

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/mypy

bench: .venv/installed-dev  ## ratios to a lower bound or to another tool, 15 minutes; ROWS=name,... for some
	$(BIN)/python -m benchmarks $(ROWS)

# It needs no environment of ours and no network, but a Python with PyTorch: GPU_PYTHON, or python3.
export GPU_PYTHON
gpu:  ## what a GPU reaches, eight minutes at most; says what it cannot check
	$(PYTHON) -m benchmarks.gpu

help-texts: .venv/installed-dev  ## what --help prints, after a command has changed
	$(BIN)/python -m tests.store_help

permissions: .venv/installed-dev  ## the IAM permissions of the stacks, after a template has changed
	$(BIN)/python -m tests.support.stack_permissions

picture: .venv/installed-dev  ## docs/*.svg and *.webp, from real runs in a real terminal and browser (needs tmux, Chromium)
	$(BIN)/python docs/picture.py
	$(BIN)/python -m docs.picture_pages

# Python versions for which the wheel is tried, if this machine has them.
PYTHONS := python3.11 python3.12 python3.13 python3.14

wheel: .venv/installed-dev  ## wheel and sdist in dist/, checked, and tried in empty environments
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.try_wheel dist $(PYTHONS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "batchml needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	# Older pips write start scripts that import re, which doubles the time of `batchml --version`.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch .venv/installed $@

# checkov needs another boto3, so the scanners of cfn/ have an environment of their own.
.venv-scan/installed: tests/security/scanners.txt
	$(PYTHON) -m venv .venv-scan
	.venv-scan/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# Each client needs its own versions of packages. pip caches downloads, so a second time is quick.
.venv-clients/%/installed: tests/clients/%.txt
	$(PYTHON) -m venv .venv-clients/$*
	.venv-clients/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-scan .venv-clients dist build .mypy_cache .ruff_cache .pytest_cache
