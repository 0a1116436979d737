# Two commands on a fresh machine: `make run` trains the demo, `make test` checks everything.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
TRITON := triton==3.6.0
# Two processes, each with a thread and with half of the files, so that what a file sets up is set up once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: run test test-long lint install dev docs clean

run: $(VENV)/.installed
	$(BIN)/redline train $(ARGS)

test: lint
	$(PYTEST)

test-long: lint
	$(PYTEST) -m ""

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

docs: $(VENV)/.installed
	$(BIN)/python -m redline.config.docs docs/options.md

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Redline needs Python 3.11 or newer; name one: make run PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make environments: install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# A GPU build of torch brings its own triton. For a CPU build this is the one whose interpreter the tests run.
	@$(BIN)/python -c 'import triton' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TRITON)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
