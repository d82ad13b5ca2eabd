# Every target makes what it needs: a virtual environment in .venv, filled from the locks.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench gpu-test gpu-bench wheel lock clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "posenc needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.lock pyproject.toml | $(BIN)/python
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed-test: requirements-test.lock $(VENV)/.installed
	$(PIP) -r requirements-test.lock
	@touch $@

demo: $(VENV)/.installed ## compare encodings on the embedded corpus; prints where the report is
	$(BIN)/posenc compare --out posenc-demo --replace

test: check ## run the whole suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --durations=10

check: $(VENV)/.installed-test ## format, lint and types
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

format: $(VENV)/.installed-test ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-test ## time attention with encodings against attention without
	$(BIN)/python benchmarks/attention_bias.py
	$(BIN)/python benchmarks/import_time.py

gpu-test: $(VENV)/.installed-test ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

gpu-bench: $(VENV)/.installed-test ## the benchmarks on a CUDA device
	$(BIN)/python benchmarks/attention_bias.py --device cuda

wheel: $(VENV)/.installed-test ## build the wheel and the source archive into dist/
	$(BIN)/python -m build --quiet

lock: $(VENV)/.installed ## resolve the pinned packages anew
	$(BIN)/python scripts/lock.py

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
