# make demo | test | lint | bench | bench-wan | clean. Each sets up .venv first, once per change of
# pyproject.toml or constraints.txt; the first time takes a minute or more (it installs torch).

PYTHON ?= python3
, := ,
BIN := .venv/bin
# What pip says of index settings of this machine is noise; what goes wrong is shown.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INPUTS := pyproject.toml constraints.txt
SIMULATED := tests/unit tests/conformance tests/protocol
FAILURES := $(patsubst %,tests/process/test_%.py,failures partitions resume trainers volunteers)
BENCH_LIMIT_S ?= 7200
BENCHMARKS := $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

# $(call install,EXTRAS,STAMPS): editable, within the known-good set.
define install
	@echo "setting up .venv$(if $(1), with $(1)); the first time takes a minute or more"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "needs Python 3.11 or newer, as in: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt -e '.$(1)' 2>.venv/pip.log || { cat .venv/pip.log; exit 1; }
	@touch $(2)
endef

.PHONY: demo test test-simulated test-failures test-process lint lint-packages lint-benchmarks \
  bench bench-wan clean setup setup-test setup-lan

demo: .venv/.stamp
	@$(BIN)/swarm demo

setup: .venv/.stamp
setup-test: .venv/.stamp-test
setup-lan: .venv/.stamp-lan

# The extras only add packages, so a set-up with more of them counts as one with fewer.
.venv/.stamp: $(INPUTS)
	$(call install,,$@)

.venv/.stamp-test: $(INPUTS)
	$(call install,[test],.venv/.stamp $@)

.venv/.stamp-lan: $(INPUTS)
	$(call install,[lan$(,)test],.venv/.stamp .venv/.stamp-test $@)

test: test-simulated test-failures test-process

# In memory, under virtual time: they share the cores.
test-simulated: .venv/.stamp-test
	@$(BIN)/python -m pytest -n 2 $(wildcard $(SIMULATED))

# Real processes that are killed, frozen and cut off: they mostly wait for what others notice.
test-failures: .venv/.stamp-test
	@$(BIN)/python -m pytest -n 2 $(FAILURES)

# Real processes and real clocks: one after the other. tests/browser needs a Chromium on PATH and
# tests/gpu a GPU; each says so and skips itself without one.
test-process: .venv/.stamp-test
	@$(BIN)/python -m pytest $(wildcard tests/process tests/browser tests/gpu) \
	  $(addprefix --ignore=,$(FAILURES))

lint: .venv/.stamp-test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint-packages lint-benchmarks

lint-packages: .venv/.stamp-test
	@$(BIN)/python -m mypy

lint-benchmarks: .venv/.stamp-test
	@cd benchmarks && MYPYPATH=.:wan:../tests/browser:.. ../$(BIN)/python -m mypy \
		--config-file ../pyproject.toml --explicit-package-bases *.py wan/*.py

# Each prints a table and, as its last line, one JSON object; that line is kept in benchmarks/out/.
# A goal that is missed is a result, not a failure.
bench: .venv/.stamp-test
	@mkdir -p benchmarks/out
	@for file in $(BENCHMARKS); do \
	  name=$${file#benchmarks/}; name=$${name%.py}; echo "== $$name"; \
	  timeout $(BENCH_LIMIT_S) $(BIN)/python $$file > benchmarks/out/$$name.txt \
	    2>benchmarks/out/$$name.err \
	    || echo "   $$name failed: $$(tail -n 1 benchmarks/out/$$name.err)"; \
	  grep -v '^{"bench"' benchmarks/out/$$name.txt; \
	  tail -n 1 benchmarks/out/$$name.txt | grep '^{"bench"' > benchmarks/out/$$name.json \
	    || rm -f benchmarks/out/$$name.json; \
	done

# Over emulated home connections: network namespaces, so as root. Same contract, with what the lab gave
# beside each result. Four hours and a quarter; `everything.py --list` says of what.
bench-wan: .venv/.stamp-test
	@$(BIN)/python benchmarks/wan/everything.py

clean:
	@rm -rf .venv build dist *.egg-info benchmarks/out benchmarks/.mypy_cache .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
