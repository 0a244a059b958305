# make run        a trained quickstart, from nothing
# make test       the default suite (a few minutes)   make test-all   with the slow tests
# make check      what every commit must pass
# make docs       the documentation as pages, build/docs/index.html; a broken link is an error

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# make lint is the part of check that is not tests
.PHONY: run test test-all lint check install clean reliability scale docs ecosystem

$(BIN)/wb: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[sample]'
	touch $(BIN)/wb

$(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $(VENV)/.test

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(VENV)/.dev

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $(VENV)/.docs

install: $(BIN)/wb

run: $(BIN)/wb
	$(BIN)/wb run experiments/quickstart.yaml

test: $(VENV)/.test
	$(BIN)/python -m pytest

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -m 'not gpu'

# kills, faults and what surviving them costs: writes reports/reliability.md (about ten minutes)
reliability: $(VENV)/.test
	$(BIN)/python tests/reliability.py

# one model on several processes: speed, equality, deaths, resumes: writes reports/scale.md (minutes)
scale: $(VENV)/.test
	$(BIN)/python tests/scale.py

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

# tracking servers, imports and the tutorial: writes reports/ecosystem.md (about ten minutes)
ecosystem: $(VENV)/.test
	$(BIN)/python tests/ecosystem.py

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) build *.egg-info
