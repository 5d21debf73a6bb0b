# `make demo` and `make test` do all their set-up themselves: a clone, Python >= 3.11 and pip are enough.

SUITABLE := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
PYTEST_FLAGS ?=
CODE := rope_fusion patterns tests examples

.PHONY: demo test check lint types examples format clean

demo: .venv/installed
	$(BIN)/rope-fusion demo

test: .venv/installed
	$(BIN)/python -m pytest -ra $(PYTEST_FLAGS)

# Tests come before the rest only when asked for first, as `make test check` does; they run once either way.
check: lint types test examples

lint: .venv/installed
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: .venv/installed
	$(BIN)/mypy

examples: .venv/installed
	set -e; for example in examples/*.py; do echo "== $$example"; $(BIN)/python $$example; done

format: .venv/installed
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# torch goes first: with it in place no other requirement chooses a torch build of its own.
.venv/installed: requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "rope_fusion needs Python 3.11 or newer with venv; name it: make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
