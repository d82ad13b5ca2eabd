# Every target makes what it needs: a virtual environment in .venv, filled from the locks.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
# That of the oldest PyTorch that pyproject.toml allows.
OLDEST_TRITON := 3.6.0
# Not compiled while installing: Python compiles what is imported, once, which is far less. That
# only pays if the compiled files are kept, so the variable that forbids it is not passed on.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help style types suite kernels test-sanitized demo demo-extend test test-anywhere fuzz-attention sweep-transformers sweep-doctor sweep-stretching engines fuzz-triton fuzz-files fuzz-options fuzz-calls mutants test-exhaustive test-versions test-transformers check docs site format pages bench real gpu-test gpu-bench wheel wheels test-wheel check-locks test-oldest-triton lock clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# A stamp, not bin/python: a venv that was interrupted half-way has that file too.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "posenc needs Python 3.11 or newer; $(PYTHON) is not. Remedy: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ echo "$(PYTHON) could not make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@touch $@

$(VENV)/.installed: requirements.lock pyproject.toml | $(VENV)/.made
	@echo "Installing requirements.lock into $(VENV) (PyTorch is large: some minutes the first time)"
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: requirements-test.lock $(VENV)/.installed
	@echo "Installing requirements-test.lock into $(VENV)"
	@$(PIP) -r requirements-test.lock
	@touch $@

$(VENV)/.installed-bench: requirements-bench.lock $(VENV)/.installed-test
	@echo "Installing requirements-bench.lock into $(VENV)"
	@$(PIP) -r requirements-bench.lock
	@touch $@

$(VENV)/.installed-mutants: requirements-mutants.lock $(VENV)/.installed-test
	@echo "Installing requirements-mutants.lock into $(VENV)"
	@$(PIP) -r requirements-mutants.lock
	@touch $@

$(VENV)/.installed-wheels: requirements-wheels.lock $(VENV)/.installed-test
	@echo "Installing requirements-wheels.lock into $(VENV)"
	@$(PIP) -r requirements-wheels.lock
	@touch $@

# The kernels' own name follows from sources and processor: this asks whether it is there.
$(VENV)/.kernels: $(wildcard src/posenc/attention/backends/native/csrc/*) $(VENV)/.installed
	@$(BIN)/python -m posenc.attention.backends.native
	@touch $@

kernels: $(VENV)/.kernels ## build the CPU kernels, once

demo: $(VENV)/.installed $(VENV)/.kernels ## compare encodings on the shipped text; prints where the report is
	$(BIN)/posenc compare --out posenc-demo --replace

demo-extend: $(VENV)/.installed ## stretch a small model by every method; prints where the report is
	rm -rf posenc-demo-extend
	$(BIN)/posenc extend --method all --factor 2 --finetune-steps 20 --out posenc-demo-extend

test-sanitized: $(VENV)/.installed-test ## each variant of the CPU kernels by each compiler under sanitizers
	OMP_NUM_THREADS=2 $(BIN)/python scripts/sanitized_kernels.py

# Types keep one process that needs nothing of the tests; the site is built by the first that needs it.
test: $(VENV)/.installed-test ## run format, lint, types and the whole suite
	@$(MAKE) --no-print-directory --jobs=2 types suite

suite: style $(VENV)/.kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not exhaustive" --durations=10

test-anywhere: $(VENV)/.installed-test $(VENV)/.kernels ## tests that know the machine, as on other machines; half an hour
	$(BIN)/python -m tests.support.anywhere --workers $(WORKERS)

sweep-doctor: $(VENV)/.installed-test ## diagnose every causal language model of transformers (some 15 minutes)
	$(BIN)/python -m tests.transformers.doctor.sweep

fuzz-files: $(VENV)/.installed-test ## damage files that posenc reads, in many ways; it must say so
	$(BIN)/python -m tests.hostile.hostile_files 7000

sweep-stretching: $(VENV)/.installed-test ## stretch every RoPE model type of transformers; none may be wrong
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.transformers.stretching.sweep

engines: $(VENV)/.installed-test ## hold the rules of other engines to these engines, each in an environment of its own; an hour
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.engine_rules

check: style types ## format, lint and types

style: $(VENV)/.installed-test
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: style
	$(BIN)/mypy --no-error-summary

docs: $(VENV)/.installed-test ## write the pages of docs/ that follow from the registry, build the site in build/docs
	$(BIN)/python -m scripts.docs
	$(BIN)/python scripts/transformers_models.py
	$(BIN)/python scripts/notebooks.py
	@$(MAKE) --no-print-directory site

# What Sphinx has read it does not warn of again.
site: $(VENV)/.installed-test $(VENV)/.kernels
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs || \
		{ rm -rf build/doctrees; exit 1; }

format: $(VENV)/.installed-test ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pages: $(VENV)/.installed-test ## write the tables of pages from the results they show
	$(BIN)/python -m benchmarks.pages

bench: $(VENV)/.installed-bench $(VENV)/.kernels ## time attention with encodings against attention without
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.import_time

fuzz-attention: $(VENV)/.installed-test ## random calls of attend, every backend against the reference
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.attention_fuzz --count 2000

sweep-transformers: $(VENV)/.installed-test ## posenc under every model type of transformers, against its own attention
	$(BIN)/python -m tests.testing.transformers_sweep

test-transformers: $(VENV)/.installed-test ## transformers' own tests of models, with and without posenc; an hour
	$(BIN)/python scripts/transformers_tests.py

fuzz-triton: $(VENV)/.installed-test ## random calls of the Triton kernels, interpreted, against the reference
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.attention_fuzz --backend triton --count 640

fuzz-calls: $(VENV)/.installed-test ## invalid calls of the public API: each must be refused by name
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.call_fuzz --count 10000

fuzz-options: $(VENV)/.installed-test ## try random options of every method
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.option_fuzz --samples 50000

mutants: $(VENV)/.installed-mutants $(VENV)/.kernels ## change lines at random and list what no test notices; hours
	$(BIN)/python scripts/mutants.py --count 200 --seed $$(date +%j)
	$(BIN)/python scripts/mutants.py --planted scripts/kernel_mutants.toml

test-exhaustive: $(VENV)/.installed-test $(VENV)/.kernels ## every case of what the suite tries with a few; some ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m exhaustive

test-versions: $(VENV)/.installed-test ## the demo, integrations and laws on the oldest and newest PyTorch and transformers; two hours
	$(BIN)/python scripts/dependency_trial.py $(TESTS)

real: $(VENV)/.installed-test $(VENV)/.kernels ## fetch models with pretrained weights, run posenc's programs on them; half an hour
	$(BIN)/python -m benchmarks.real_models

gpu-test: $(VENV)/.installed-test ## on a CUDA device: its trial and the tests that need one, 12 minutes
	$(BIN)/python -m benchmarks.device --steps trial tests

gpu-bench: $(VENV)/.installed-bench $(VENV)/.kernels ## the same, compiled code, times and memory, 25 minutes
	$(BIN)/python -m benchmarks.device

wheel: $(VENV)/.installed-test ## build the wheel and the source archive into dist/
	$(BIN)/python -m build --no-isolation

wheels: $(VENV)/.installed-wheels ## wheels with compiled kernels for Linux, and what make wheel builds, into dist/
	$(BIN)/python scripts/wheels.py

test-wheel: ## install the wheel of dist/ without a compiler and run tests on each variant that runs here
	$(PYTHON) scripts/wheel_trial.py

check-locks: $(VENV)/.installed-test ## ask the package index alone whether the locks can be installed
	$(BIN)/python scripts/lock.py --check

test-oldest-triton: $(VENV)/.installed-test ## compile the CUDA kernels with the oldest Triton that posenc takes
	$(PIP) --no-deps --upgrade --target build/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	PYTHONPATH=build/triton-$(OLDEST_TRITON) $(BIN)/python -m pytest -q -k "not limits" tests/attention/triton_compiling.py

lock: $(VENV)/.installed-test ## pin what pyproject.toml newly needs; all anew: make lock UPGRADE=--upgrade
	$(BIN)/python scripts/lock.py $(UPGRADE)

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
