# Commands for developers and for CI. Each target installs what it needs into a virtual environment.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One more than cores, since tests of the server and of other processes wait a quarter of their time; 9 at most, for their memory.
PROCESSES ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1) + 1)")

# Modules are compiled once and kept, even where the shell forbids it: the suite starts hundreds of processes, and each would
# compile torch, transformers and the rest again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu check format benchmark clean

demo: $(INSTALLED)  ## `run` on generated support messages; ends with a table and a curl line
	$(BIN)/stillroom demo --out demo

test: $(INSTALLED)  ## every test that needs neither minutes of training nor a GPU
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --benchmark-disable

test-slow: $(INSTALLED)  ## whole runs, kills and resumes included
	$(BIN)/python -m pytest -m slow

test-gpu: $(INSTALLED)  ## tests that need CUDA; they are skipped, with a reason, where there is none
	$(BIN)/python -m pytest -m gpu

check: $(INSTALLED)  ## lint, formatting, types, which folder may import which, and the size of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/budget.py --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks --benchmark-only -o addopts=

clean:
	rm -rf .import_linter_cache $(VENV) demo demo.data demo.work .pytest_cache .mypy_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): about 3 GB, some minutes; pip is silent meanwhile"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[build,demo,dev]"
	touch $@
