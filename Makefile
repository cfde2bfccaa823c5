# koalapy: the same targets for people and for CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test chaos check format bench bench-advisor experiment experiment-live clean testbed testbed-down

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-15s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "koalapy needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[mpi,dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## one MPI program as a single job over two embedded clusters
	@$(BIN)/koala demo

test: $(STAMP)  ## the whole test suite, by two workers
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

chaos: $(STAMP)  ## random kills and stops under up to 1400 jobs, with SQLite and with PostgreSQL: ten minutes
	$(BIN)/python -m tests.chaos --minutes 4.3
	$(BIN)/python -m tests.chaos --minutes 4.3 --postgresql

testbed:  ## two Slurm clusters and a Grid Engine cluster in containers, with the daemon and PostgreSQL
	@deploy/testbed/control up

testbed-down:  ## remove the testbed and all it holds
	@deploy/testbed/control down

check: $(STAMP)  ## lint, format, types, and the arrows between the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 -p koalapy.runtime
	$(BIN)/vermin --quiet --target=3.9- --no-tips koalapy/runtime
	$(BIN)/lint-imports

format: $(STAMP)  ## bring the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## speed: start-up overhead and throughput, as JSON
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-json=bench.json -p no:cacheprovider -s --timeout 600

bench-advisor: $(STAMP)  ## mean response times of auto against fixed policies, in the virtual world: twenty minutes
	$(BIN)/python -m tests.benchmarks.coallocation --seeds 20

experiment: $(STAMP)  ## the workload of mohamed-2005 on an embedded grid whose starts fail: about half an hour
	$(BIN)/python -m tests.experiments.koala_m05 --jobs 500 --threshold 0 --threshold 1 --failures 0.3

experiment-live: $(STAMP)  ## prime, poisson and wave under three policies on the grid at KOALA_URL: about twenty minutes
	KOALA=$(BIN)/koala docs/experiments/live/run

clean:  ## remove the environment and everything made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench.json
