# Each target sets up what it needs in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test bench docs clean

demo: $(READY)
	$(BIN)/headway demo

test: $(READY)
	$(BIN)/ruff check src tests bench docs
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

docs: $(READY)
	MPLBACKEND=Agg OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "The site: docs/_build/html/index.html"

bench: $(READY)
	$(BIN)/python bench/all.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache docs/_build docs/gallery
