# Each target sets up what it needs in .venv. Outside it nothing is touched, but for the browser that make test gets
# from Debian where it may: as root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# make fuzz: examples of each property, and seconds after which no further property is begun
EXAMPLES ?= 200
SECONDS ?= 600

.PHONY: demo test check-docs fuzz bench docs clean

demo: $(VENV)/.demo
	$(BIN)/headway demo

test: $(VENV)/.test
	$(BIN)/ruff check src tests bench docs
	$(BIN)/mypy
	$(PYTEST) -m "not docs"

check-docs: $(VENV)/.test $(VENV)/.docs
	$(PYTEST) -m docs

fuzz: $(VENV)/.test
	FUZZ_EXAMPLES=$(EXAMPLES) FUZZ_SECONDS=$(SECONDS) $(PYTEST) -rs -m hypothesis

docs: $(VENV)/.docs
	MPLBACKEND=Agg OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "The site: docs/_build/html/index.html"

bench: $(VENV)/.test
	$(BIN)/python bench/all.py

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --no-build-isolation -e '.[test]'
	$(BIN)/python tests/browser.py
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache docs/_build docs/gallery
