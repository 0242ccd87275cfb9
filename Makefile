# Every target sets up what it needs: a first `make demo` or `make test` makes .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
INTEGRATIONS := integrations/llama-index integrations/langchain

.DEFAULT_GOAL := help
.PHONY: setup demo test lint format help

setup: $(READY) ## make .venv with the tested versions of everything

# torch goes first and alone, so that pip takes the build (CPU or GPU) offered here.
$(READY): pyproject.toml constraints.txt $(INTEGRATIONS:%=%/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -c constraints.txt $(INTEGRATIONS:%=-e %)
	touch $@

demo: $(READY) ## run the demo: answers with and without reuse, and how long each took
	$(BIN)/cacheblend-rag demo

test: $(READY) ## run the tests, the integrations' tests and the notebooks
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --nbmake examples
	for folder in $(INTEGRATIONS); do \
		$(MAKE) -C $$folder test integration_tests BIN=$(CURDIR)/$(BIN) || exit 1; \
	done

lint: $(READY) ## check style, types and the layers between modules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	for folder in $(INTEGRATIONS); do $(MAKE) -C $$folder lint BIN=$(CURDIR)/$(BIN) || exit 1; done

format: $(READY) ## put the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
