# koalapy: the same targets for people and for CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 10
WORKERS ?= 2
LOCKS := requirements
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
# What is installed is what is written down, with the SHA-256 of each file, and nothing besides: no dependency is looked
# for, and nothing is built but what has no wheel, by tools that are written down as well.
INSTALL = -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all:
RELEASE := .venv-release
# Of which a site may have use; `dev` is for those who work on koalapy.
EXTRAS := drmaa experiments mpi plots postgresql
LOCK = $(RELEASE)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(UPGRADE) \
	--custom-compile-command 'make lock'

.PHONY: help demo test test-processes test-testbed test-nightly chaos crash fuzz machine check size format bench bench-core bench-advisor bench-relay bench-dashboard screenshots experiment experiments experiment-live clean testbed testbed-down lock \
	release docs

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-15s %s\n", $$1, $$2}'

$(VENV)/.mpi: pyproject.toml $(LOCKS)/build.txt $(LOCKS)/mpi.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "koalapy needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Installing koalapy, its libraries and Open MPI into $(VENV), once: about 250 MB"
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python $(INSTALL) --require-hashes -r $(LOCKS)/build.txt
	@$(BIN)/python $(INSTALL) --require-hashes -r $(LOCKS)/mpi.txt
	@$(BIN)/python $(INSTALL) --no-build-isolation --editable .
	@touch $@

$(STAMP): $(VENV)/.mpi $(LOCKS)/dev.txt
	@echo "Installing what tests and checks need into $(VENV), once: about 700 MB more"
	@$(BIN)/python $(INSTALL) --require-hashes --no-build-isolation --no-binary drmaa -r $(LOCKS)/dev.txt
	@$(BIN)/python -m deploy.locked
	@touch $@

$(RELEASE)/.installed: $(LOCKS)/release.txt
	@$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(INSTALL) --require-hashes -r $(LOCKS)/release.txt
	@touch $@

lock: $(RELEASE)/.installed  ## write down anew what pyproject.toml asks for; UPGRADE=--upgrade takes the newest of all
	$(LOCK) --all-extras pyproject.toml --output-file $(LOCKS)/dev.txt
	$(LOCK) $(EXTRAS:%=--extra %) --constraint $(LOCKS)/dev.txt pyproject.toml --output-file $(LOCKS)/install.txt
	$(LOCK) --extra mpi --constraint $(LOCKS)/dev.txt pyproject.toml --output-file $(LOCKS)/mpi.txt
	$(LOCK) --group build --constraint $(LOCKS)/dev.txt --output-file $(LOCKS)/build.txt
	$(LOCK) --group release --constraint $(LOCKS)/dev.txt --output-file $(LOCKS)/release.txt

release: $(RELEASE)/.installed  ## the packages of the last commit, what they are made of (CycloneDX), and checksums, in dist/
	@$(RELEASE)/bin/python -m deploy.release dist

demo: $(VENV)/.mpi  ## one MPI program as a single job over two embedded clusters
	@$(BIN)/koala demo

test: $(STAMP)  ## ring 1: one process, virtual time, and a dozen promises end to end; needs Python and make; about 10 minutes
	$(PYTEST) --rings 1

test-processes: $(STAMP)  ## ring 2: embedded clusters, MPI, rsync, PostgreSQL, Chromium, each where it is installed; 15 minutes
	$(PYTEST) --rings 2

test-testbed: $(STAMP)  ## ring 3: real Slurm 22.05 and 24.11 and Grid Engine; needs make testbed, and with it Docker; 15 minutes
	$(PYTEST) --rings 3

test-nightly: $(STAMP) machine  ## ring 4: every property at length, statistics, packaging, experiments, chaos, fuzz; hours
	$(PYTEST) --rings 4
	$(MAKE) chaos
	$(MAKE) crash
	$(MAKE) fuzz MINUTES=60

chaos: $(STAMP)  ## random kills and stops under up to 1400 jobs, with SQLite and with PostgreSQL: ten minutes
	$(BIN)/python -m tests.chaos --minutes 4.3
	$(BIN)/python -m tests.chaos --minutes 4.3 --postgresql

crash: $(STAMP)  ## interrupt each side effect of daemon, agents, resource managers and runners, and cut the power: an hour or two
	$(BIN)/python -m tests.crash --all "$$(mktemp)"
	$(BIN)/python -m tests.crash --power-loss 100

fuzz: $(STAMP)  ## hostile agents, daemons, runners, head nodes and users, always others: ten minutes, or make fuzz MINUTES=60
	KOALA_FUZZ_SECONDS=$$(( $(MINUTES) * 60 / 5 )) $(BIN)/python -m pytest tests/fuzz --timeout 0 -p no:cacheprovider

machine: $(STAMP)  ## 100,000 random steps of everything that can happen to the scheduler, with all its laws: about five minutes
	$(BIN)/python -m tests.scheduler.histories --steps 100000

testbed:  ## three Slurm clusters (22.05 and 24.11) and a Grid Engine cluster in containers, with the daemon and PostgreSQL
	@deploy/testbed/control up

testbed-down:  ## remove the testbed and all it holds
	@deploy/testbed/control down

check: $(STAMP)  ## lint, format, types, import contracts, locked packages, sleeps in ring 1, wording, and budgets of lines
	@! git grep -nE "^(<{7}|>{7}) " || { echo "conflict markers, see above" >&2; exit 1; }
	$(BIN)/python -m deploy.locked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 -p koalapy.runner
	$(BIN)/vermin --quiet --target=3.9- --no-tips koalapy/runner
	$(BIN)/lint-imports
	$(BIN)/python -m tests.check_rings
	$(BIN)/python -m tests.check_wording
	$(BIN)/python -m tests.check_size

size: $(STAMP)  ## lines of each package beside its budget, classes that repeat each other's fields, import circles
	@$(BIN)/python -m tests.check_size --table

docs: $(STAMP)  ## the documentation as a site, in site/: what it says of settings and the API is made of the code
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "read it: xdg-open site/index.html, or $(BIN)/python -m http.server -d site"

format: $(STAMP)  ## bring the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-core  ## speed: start-up overhead and throughput, as JSON, and the scheduler's core
	$(BIN)/python -m tests.benchmarks.submissions
	$(BIN)/python -m tests.benchmarks.one_node_jobs
	$(BIN)/python -m pytest tests/benchmarks --rings 3,4 --benchmark-only --benchmark-json=bench.json -p no:cacheprovider -s --timeout 600

bench-core: $(STAMP)  ## the scheduler alone; prints ratios to the figures of the last commit, and stores the new ones
	$(BIN)/python -m tests.benchmarks.core --store

bench-relay: $(STAMP)  ## Open MPI over relayed links beside kernel routing, in network namespaces: medians, as root, two minutes
	$(BIN)/python -m tests.benchmarks.relay

bench-dashboard: $(STAMP)  ## what each page of the dashboard costs the daemon, the dashboard in a browser (Debian's chromium), 200 open pages
	$(BIN)/python -m tests.benchmarks.dashboard
	$(BIN)/python -m tests.benchmarks.open_pages

screenshots: $(STAMP)  ## the documentation's pictures of the dashboard, by Debian's chromium
	$(BIN)/python -m tests.dashboard.screenshots

bench-advisor: $(STAMP)  ## mean response times of auto against fixed policies, in the virtual world: twenty minutes
	$(BIN)/python -m tests.benchmarks.coallocation --seeds 20

experiment: $(STAMP)  ## the workload of mohamed-2005 on an embedded grid whose starts fail, under each way of claiming: about 45 minutes
	$(BIN)/python -m tests.experiments.koala_m05 --jobs 500 --claiming atomic --claiming incremental --failures 0.3

experiment-live: $(STAMP)  ## prime, poisson and wave under three policies on the grid at KOALA_URL: about twenty minutes
	KOALA=$(BIN)/koala experiments/published/live/run

experiments: $(STAMP)  ## the papers' tables and figures, and the traces beyond, in the simulated world, into experiments/published/: under 40 minutes
	-$(BIN)/python -m experiments run --all --results experiments/published/results
	$(BIN)/python -m experiments report --results experiments/published/results -o experiments/published

clean:  ## remove the environment and everything made
	rm -rf $(VENV) $(RELEASE) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench.json
