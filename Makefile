# One Makefile for people and for CI. Every target first makes .venv, when it is missing or older
# than pyproject.toml and constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

# mypy refuses a folder without Python files, so name those that have some.
TYPED := $(patsubst %/,%,$(sort $(dir $(wildcard impala_async/__init__.py bench/*.py examples/*.py))))

HAS_PYTHON := import sys; sys.exit(sys.version_info < (3, 11))
HAS_TORCH := import sys, torch; \
	sys.exit(tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4))
SITE_FOLDERS := import site; print(*site.getsitepackages(), sep="\n")
OWN_SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: help
help: ## Show this page
	@echo 'make <target> [ARGS="..."] [PYTHON=python3.12]'
	@echo
	@awk -F ':.*## ' -v hidden='$(HIDDEN)' '/^[a-z0-9-]+:.*## / && $$1 != hidden {printf "  %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS    goes to the command behind the target:  make train ARGS="--set seed=1"'
	@echo '  WORKERS tests run at the same time, in so many processes (2); with 0 in one, as for pdb'
	@echo '  PYTHON  makes .venv (3.11 or newer); a torch >= 2.4 that it has is used as it is'

.PHONY: train
train: $(STAMP) ## Train here: one learner, its actors; CartPole unless ARGS says otherwise
	@$(BIN)/python -m impala_async.train $(ARGS)

.PHONY: test
test: $(STAMP) ## Run the tests, those with real processes too; only the slow ones are left out
	@$(PYTEST) -m "not slow" $(ARGS)

.PHONY: test-all
test-all: $(STAMP) ## Run all tests, the slow ones too
	@$(PYTEST) $(ARGS)

.PHONY: e2e
e2e: $(STAMP) ## Run only the tests with real processes
	@$(PYTEST) tests/e2e $(ARGS)

# torchrun ends a rank that stands still after half a minute: too long for `make test`.
STOPPED := "tests/e2e/test_ranks.py::test_ranks_train_again_each_time_and_no_actor_ends[stopped once]"
.PHONY: engines
engines: $(STAMP) ## Run the tests on real engines (Ray, Slurm, MPI, Kubernetes' schemas); none may be missing
	@$(PIP) install -c constraints.txt ray kubernetes-validate
	@ENGINES=required $(BIN)/python -m pytest -q -rs tests/engines $(STOPPED) $(ARGS)

.PHONY: lint
lint: $(STAMP) ## Check style and formatting
	@$(BIN)/python -m ruff check $(ARGS) .
	@$(BIN)/python -m ruff format --check .

.PHONY: types
types: $(STAMP) ## Check types, strictly
	@$(BIN)/python -m mypy $(ARGS) $(TYPED)

# No bench module, no bench target.
ifeq ($(wildcard bench/__main__.py),)
HIDDEN := bench
else
.PHONY: bench
bench: $(STAMP) ## Measure what the documentation claims
	@$(BIN)/python -m bench $(ARGS)
endif

.PHONY: clean
clean: ## Remove .venv, builds and caches; run folders stay
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An existing torch is used where it lies. A venv made from a venv sees only the base Python's
# packages, so the folders of the outer one are then added through a .pth file.
$(BIN)/python:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "error: no Python at '$(PYTHON)'; try make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@'$(PYTHON)' -c '$(HAS_PYTHON)' || { \
	  echo "error: impala-async needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$('$(PYTHON)' -V 2>&1); try make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if '$(PYTHON)' -c '$(HAS_TORCH)' 2>/dev/null; then \
	  echo "making $(VENV) on top of the torch that $(PYTHON) has ..."; \
	  '$(PYTHON)' -m venv --clear --system-site-packages $(VENV); \
	  $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || \
	    '$(PYTHON)' -c '$(SITE_FOLDERS)' > "$$($(BIN)/python -c '$(OWN_SITE)')/outer.pth"; \
	else \
	  echo "making $(VENV) ..."; \
	  '$(PYTHON)' -m venv --clear $(VENV); \
	fi

# The torch pin goes only where a shared torch really answers: without a pin pip would fetch the
# biggest build there is. The build tools come first, so that pip fetches no unpinned ones.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@if grep -q '^include-system-site-packages = true' $(VENV)/pyvenv.cfg \
	    && $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null; then \
	  sed '/^# torch$$/,/^$$/d' constraints.txt > $(VENV)/constraints.txt; \
	else \
	  cp constraints.txt $(VENV)/constraints.txt; \
	fi
	@echo "installing impala-async and its tools into $(VENV), a few minutes the first time ..."
	@$(PIP) install -c $(VENV)/constraints.txt hatchling editables
	@$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
