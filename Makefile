# `make demo` and `make test` set everything up by themselves; neither installs twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
# One more than the cores of the smallest machine: kills and sleeps leave them idle.
SIDE_BY_SIDE := -n 3 --dist worksteal
CLUSTERS := tests/faults/test_ray*.py
LOWEST_PYTHON ?= 3.10
NEWEST_PYTHON ?= 3.13

.PHONY: help install demo docs test lowest newest gpu strace chromium check nightly full clusters durability chaos faults format clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1  /p' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## cross-validate 2 models × 2 LR schedules on digits, against the serial loop
	@rm -rf $(DEMO)
	$(BIN)/asynckfold run --data digits --models mlp,lenet5 --schedulers cosine,warm \
	  --optimizer adam --lr 1e-3 --folds 5 --epochs 5 --batch-size 32 --seed 0 --n-jobs auto \
	  --baseline measure --root $(DEMO)

install: $(VENV)/installed-test  ## the virtual environment, with what the tests need

test: $(VENV)/installed-test check strace  ## what must hold at every change: 7 minutes on two cores
	$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

# The first installation takes the lowest versions of pyproject.toml; the second keeps them.
lowest: $(VENV)/bin/uv  ## the tests on the lowest Python and versions that pyproject.toml declares
	$(BIN)/uv venv --quiet --clear --python $(LOWEST_PYTHON) build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest --resolution lowest-direct --editable .
	$(BIN)/uv pip install --quiet --python build/lowest --editable '.[test]'
	build/lowest/bin/python -m pytest -q $(SIDE_BY_SIDE)

newest: $(VENV)/bin/uv  ## the tests on the newest Python that torch supports here
	$(BIN)/uv venv --quiet --clear --python $(NEWEST_PYTHON) build/newest
	$(BIN)/uv pip install --quiet --python build/newest --editable '.[test]'
	build/newest/bin/python -m pytest -q $(SIDE_BY_SIDE)

gpu: $(VENV)/installed-test  ## what can be tested on a real GPU only
	$(BIN)/python -m pytest -v -s tests/gpu

NIGHT := check docs full clusters lowest newest durability chaos faults
nightly: $(VENV)/installed-nightly strace chromium  ## everything at full size, and a table of it: hours
	@failed=0; table=""; for part in $(NIGHT); do \
	  began=$$(date +%s); result=passed; $(MAKE) $$part || { result=FAILED; failed=1; }; \
	  table="$$table| $$part | $$result | $$((($$(date +%s) - began) / 60)) |\n"; \
	done; printf "| part | result | minutes |\n|---|---|---:|\n$$table"; exit $$failed

full: $(VENV)/installed-nightly
	$(BIN)/python -m pytest -q --nightly $(SIDE_BY_SIDE) --timeout 600 -o faulthandler_timeout=590 \
	  --ignore tests/durability --ignore-glob '$(CLUSTERS)'

# Each starts several nodes and is timed by what is idle: one after another.
clusters: $(VENV)/installed-nightly
	$(BIN)/python -m pytest -q --nightly --timeout 600 -o faulthandler_timeout=590 $(CLUSTERS)

# The tests that kill at system calls, and those of the page in a browser, need these, and are skipped
# with a reason without them. Only where nobody has to be asked: as root on a system with apt-get.
strace chromium:
	@command -v $@ >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { export DEBIAN_FRONTEND=noninteractive; timeout 600 apt-get install -y -qq $@ || \
	  { timeout 120 apt-get update -qq && timeout 600 apt-get install -y -qq $@; }; } \
	  >/dev/null 2>&1 || true

check: $(VENV)/installed-test  ## lint, types, import layers, weight
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house

durability: $(VENV)/installed-test strace  ## every kill point, I/O error, power loss and bit flip: minutes
	$(BIN)/python -m pytest -q --nightly $(SIDE_BY_SIDE) --timeout 3600 -o faulthandler_timeout=3600 tests/durability

chaos: $(VENV)/installed-test  ## 200 kills at random, each a non-event: the better part of an hour; the table goes to reports/chaos
	$(BIN)/python -m tests.chaos --seed 0 --kills 200 --report reports/chaos/README.md

faults: $(VENV)/installed-test strace  ## plant twelve faults, one at a time: `make test` must notice each
	$(BIN)/python -m tests.planted_faults

docs: $(VENV)/installed-docs  ## the documentation as a site, links checked: build/site/index.html
	@mkdir -p build/docs
	@for name in README.md CHANGELOG.md CONTRIBUTING.md docs reports; do ln -sfn ../../$$name build/docs/$$name; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml

format: $(VENV)/installed-test  ## bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and what runs left
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/bin/uv: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet uv

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/installed-nightly: $(VENV)/installed-test pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[browser,lightning,mlflow,optuna,pyg,ray,skorch,tensorboard,test,transformers]' pycocotools timm
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
