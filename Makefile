# Every target does its own set-up in .venv; nothing needs to be installed by hand but Python.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: venv demo test lint docs bench clean

venv: $(READY)

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	touch $(READY)

demo: venv  ## a real swarm on this machine: one auxiliary, two trainers, the built-in model and corpus
	$(BIN)/collab demo --epochs 100

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: venv lint
	$(BIN)/python -m pytest

docs: venv
	$(BIN)/mkdocs build --strict

bench: venv  ## half an hour on two idle cores; goes on where it was stopped
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist site *.egg-info
