# Each target sets up what it needs in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test bench clean

demo: $(READY)
	$(BIN)/headway demo

test: $(READY)
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

bench: $(READY)
	for name in speed rank success few noise memory sculpt cost coverage certify_large mixture planted \
		guarantee selecting modules trained baselines; do $(BIN)/python bench/$$name.py || exit 1; done

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
