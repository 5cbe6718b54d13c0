# Each target sets itself up: it makes a virtual environment, installs what it needs there, and installs nothing the
# second time. The stamps depend on pyproject.toml and the pinned versions.

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean check-python
SHELL := /bin/bash

PYTHON ?= python3
ARGS ?=
JOBS ?= 2

version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The default Python lives in .venv, any other in a folder of its own.
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := .venv-$(version)
endif

pinned := $(wildcard constraints/python$(version).txt)
pip := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(addprefix -c ,$(pinned))
core := $(VENV)/.installed-core-$(version)
dev := $(VENV)/.installed-dev-$(version)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=python3.12 takes another Python (and its own .venv-3.12); ARGS=... goes to the demo or to pytest."

demo: $(core) ## train on Catch and CartPole, and draw what came of it
	@$(VENV)/bin/podracer demo $(ARGS)

test: $(dev) ## run the tests
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(dev) ## check style, types and who imports whom
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

clean: ## remove what builds and tests leave behind; virtual environments and runs stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .cache
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

check-python:
	@test -n "$(version)" || { echo "make: $(PYTHON) does not run; expected Python 3.11 or newer. Give PYTHON=path/to/python3." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is Python $(version); expected 3.11 or newer. Give PYTHON=path/to/python3." >&2; exit 1; }

# An environment of another Python version is not ours to delete.
define make_venv
@if [ -x $(VENV)/bin/python ] && ! $(VENV)/bin/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(version)")'; then \
  echo "make: $(VENV) belongs to another Python than $(version); remove it, or give PYTHON=..." >&2; exit 1; fi
@$(VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
endef

$(core): pyproject.toml $(pinned) | check-python
	$(make_venv)
	@echo "installing podracer into $(VENV) ..."
	@$(pip) -e .
	@touch $@

$(dev): pyproject.toml $(pinned) | check-python
	$(make_venv)
	@echo "installing podracer, its test tools the environment libraries and the TPU compiler into $(VENV) ..."
	@$(pip) -e '.[dev,envs,tpu]'
	@touch $(core) $@
