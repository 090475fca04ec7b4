# Every target does its own set-up in .venv; nothing needs to be installed by hand but Python.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
unexport PYTHONDONTWRITEBYTECODE  # where it is set, each of the hundreds of Pythons of a test run compiles all our sources

.PHONY: venv demo test lint lab-tools browser-tools docs bench clean

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
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose.yaml

lab-tools:  ## what tests/lab needs; without root those tests are skipped, and say so
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! (command -v ip && command -v iptables && \
		ls /usr/lib/*/faketime/libfaketime.so.1) >/dev/null 2>&1; then \
		apt-get install --yes --quiet --no-install-recommends iproute2 iptables libfaketime >/dev/null \
		|| (apt-get update --quiet >/dev/null && \
		    apt-get install --yes --quiet --no-install-recommends iproute2 iptables libfaketime >/dev/null) \
		|| echo "iproute2, iptables and libfaketime could not be installed: tests in tests/lab will be skipped"; \
	fi

browser-tools:  ## what the tests of the dashboard's page need; without root those tests are skipped, and say so
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then \
		apt-get install --yes --quiet --no-install-recommends chromium >/dev/null \
		|| (apt-get update --quiet >/dev/null && \
		    apt-get install --yes --quiet --no-install-recommends chromium >/dev/null) \
		|| echo "chromium could not be installed: the tests of the dashboard's page will be skipped"; \
	fi

test: venv lint lab-tools browser-tools
	$(BIN)/python -m pytest --numprocesses 3 --dist loadgroup

docs: venv
	$(BIN)/mkdocs build --strict

SUITES ?= averaging round
bench: venv  ## half an hour on two idle cores; goes on where it was stopped. SUITES="join archive": others
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python -m benchmarks $(SUITES) --repeats 3

clean:
	rm -rf .venv build dist site *.egg-info
