# make help lists the targets.

PYTHON ?= python3
STAGE ?= 1
ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Variables: STAGE=1, ARGS="--tp-size 2" (flags of the server or of pytest), PYTHON=python3.12,'
	@echo 'PIP_ARGS="--extra-index-url URL" (say, an index that has CPU-only builds of torch).'

setup: $(STAMP) ## make .venv with the project and its pinned dependencies

# The environment is made once, and again only when what it should hold has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'process-eras needs Python 3.10 or newer; give one: make setup PYTHON=python3.12' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24' $(PIP_ARGS)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]' $(PIP_ARGS)
	@touch $@

serve: $(STAMP) ## start a server: make serve STAGE=1 ARGS="--port 30001"
	@package=$$(ls -d stage$(STAGE)_* 2>/dev/null); \
	  test -n "$$package" && test -f "$$package/server.py" \
	  || { echo 'no server for STAGE=$(STAGE); there is one for:' \
	       $$(ls -d stage?_*/server.py | sed 's/stage\(.\).*/\1/') >&2; exit 2; }; \
	  exec $(BIN)/python -m $$package.server $(ARGS)

test: $(STAMP) ## run the tests: make test ARGS="--stage 1 -x"
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## check style and types, as CI does
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and what tools have left
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
