# From a bare clone: each target makes what it needs. `make serve ARGS="--port 9000"`, `make PYTHON=python3.12 test`.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

.PHONY: help serve test test-fast check bench fuzz documents venv clean distclean

help:
	@echo 'make serve | test | test-fast | check | bench | fuzz | documents | venv | clean | distclean   (ARGS="…")'

serve: $(VENV)/.ready-to-serve
	@exec $(BIN)/omni-ws serve $(ARGS)

test: $(VENV)/.ready-to-test
	@$(BIN)/python -m pytest $(ARGS)

test-fast: $(VENV)/.ready-to-test
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: $(VENV)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

bench: $(VENV)/.ready-to-bench
	@$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(VENV)/.ready-to-fuzz
	@$(BIN)/python -m fuzzing $(ARGS)

documents: $(VENV)/.ready-to-serve
	@$(BIN)/python -m omni_ws.tools.documents $(ARGS)

venv: $(VENV)/.ready-to-test

# The first interpreter that is new enough and can make an environment.
$(BIN)/python:
	@for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$candidate" --version)"; \
	    exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo 'Python 3.11 or newer with its venv module is needed (on Debian: python3-venv); name one by PYTHON=' >&2; \
	exit 1

# The stamps keep later runs off the network. What tests need includes what serving needs.
$(VENV)/.ready-to-serve: pyproject.toml | $(BIN)/python
	@echo 'installing the server and its embedded engine'
	@$(PIP) --editable '.[embedded,espeak]'
	@touch $@

$(VENV)/.ready-to-test: pyproject.toml | $(BIN)/python
	@echo 'installing the server and what its tests need'
	@$(PIP) --editable '.[embedded,espeak,test,dev]'
	@touch $(VENV)/.ready-to-serve $@

$(VENV)/.ready-to-bench: $(VENV)/.ready-to-test
	@$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.ready-to-fuzz: $(VENV)/.ready-to-test
	@$(PIP) --editable '.[fuzz]'
	@touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
