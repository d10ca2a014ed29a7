# `make demo` and `make test` do all of their own set-up: a virtual environment in $(VENV), with
# the versions pinned in constraints.txt. An empty VENV uses $(PYTHON) as it is and installs
# nothing, for an environment that already has torch:  make test VENV= PYTHON=python3
#
# On Linux, pip takes torch's CUDA build unless it is told of another source. For the CPU build:
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
# Test processes, with pytest-xdist; 0 runs them in one process.
JOBS ?= 2
# Of the selection of tests; without, it is the number of the day.
SEED ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
GATE_ARGS ?=
LEDGER_ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
READY_BENCH :=
READY_SITE :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
READY_BENCH := $(VENV)/.installed-bench
READY_SITE := $(VENV)/.installed-site
endif

PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

# $(call has,MODULE): the shell condition that $(PY) can import it
has = $(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("$(1)") is None)'

# $(call tool,MODULE,COMMAND): run it. Only an environment that is not ours (VENV=) may lack it.
ifeq ($(strip $(VENV)),)
tool = @if $(call has,$(1)); then echo "$(2)"; $(2); else echo "skipped: $(PY) has no $(1)"; fi
else
tool = $(2)
endif

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint typecheck quick rest unit bench gate ledger docs docs-site fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## compile four whole models, stock and fused, and compare them
	$(PY) -m inductor_fusions demo $(DEMO_ARGS)

test: lint typecheck quick ## ruff, mypy and a selection of the tests: seven to ten minutes on two cores

check: lint typecheck $(READY) ## ruff, mypy and the cheapest tests: three minutes on two cores
	$(call pytest,--part quick --budget 90 $(SEEDED))

test-all: lint typecheck unit ## ruff, mypy and every test; GPU tests are skipped without a GPU

lint: $(READY) ## ruff: rules and format
	$(call tool,ruff,$(PY) -m ruff check .)
	$(call tool,ruff,$(PY) -m ruff format --check .)

typecheck: $(READY) ## mypy --strict on the package
	$(call tool,mypy,$(PY) -m mypy)

# $(call pytest,ARGUMENTS)
define pytest
@$(call has,pytest) || { echo "the tests need pytest: $(PY) -m pip install pytest" >&2; exit 1; }
@set -- $(1) $(PYTEST_ARGS); \
if [ "$(JOBS)" != 0 ] && $(call has,xdist); then set -- -n $(JOBS) --maxschedchunk=4 "$$@"; fi; \
echo "$(PY) -m pytest $$*"; $(PY) -m pytest "$$@"
endef
SEEDED = $(if $(SEED),--seed $(SEED))

quick: $(READY) ## the tests of `make test` alone; SEED=7 selects others
	$(call pytest,--part quick $(SEEDED))

rest: $(READY) ## the tests that `make test` with the same SEED leaves
	$(call pytest,--part rest $(SEEDED))

unit: $(READY) ## every test; PYTEST_ARGS='tests/lora -k dropout' for some
	$(call pytest,--part all)

bench: $(READY_BENCH) ## some operations, blocks and models, checked and timed, stock beside fused
	$(PY) -m inductor_fusions bench --quick $(BENCH_ARGS)

gate: $(READY_BENCH) ## whole models and operations, stock beside fused; GATE_ARGS='--compare old.json'
	$(PY) -m inductor_fusions bench $(GATE_ARGS)

ledger: $(READY) ## count anew what is compiled for each model: devtools/ledger.json
	$(PY) -m devtools.ledger $(LEDGER_ARGS)

docs: $(READY_BENCH) ## write what the results say into the documentation
	$(PY) -m bench.docs

docs-site: $(READY_SITE) ## the documentation as a site with search and the API: build/site/index.html
	$(PY) -m mkdocs build --quiet

fuzz: $(READY) ## random programs for hours; FUZZ_ARGS='--examples 500 --seed 1' for less
	$(PY) -m tests.fuzz $(FUZZ_ARGS)

clean: ## remove caches and build outputs; $(VENV) stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find inductor_fusions tests bench devtools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps are newer than what they were installed from, so a second run installs nothing.
ifneq ($(strip $(VENV)),)
$(READY): pyproject.toml setup.py constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes the first time"
	@$(PIP_INSTALL) -e '.[models,dev]'
	@touch $@

$(READY_BENCH): $(READY)
	@echo "installing the benchmark tools into $(VENV)"
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@

$(READY_SITE): $(READY)
	@echo "installing the site's tools into $(VENV)"
	@$(PIP_INSTALL) -e '.[site]'
	@touch $@
endif
