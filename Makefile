# Two commands: `make demo` and `make test`. Both make .venv when it is missing and are safe to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python tools/install.py -c constraints.txt

.PHONY: demo test lint types tests slow docs figures errata clean

demo: $(VENV)/.installed
	$(BIN)/joma demo

test: lint types tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/pyright

tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

# What takes minutes, and every property test with examples that are drawn at random.
slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'slow or hypothesis' --hypothesis-profile=random

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of README and docs.
figures: $(VENV)/.installed-dev
	$(BIN)/python tools/docs_figures.py

# The page of errata, from the table in the code.
errata: $(VENV)/.installed-dev
	$(BIN)/python tools/errata_page.py

clean:
	rm -rf $(VENV) site

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "joma needs Python 3.11 or newer; say which with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What README uses: the extras for Hugging Face's trainer and models, and for `joma serve`.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing joma and what it needs, PyTorch among it, into $(VENV): some minutes, once."
	@$(INSTALL) -e '.[hf,serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing joma and what its tests and docs need into $(VENV): some minutes, once."
	@$(INSTALL) -e '.[dev]'
	@$(INSTALL) --no-deps galore-torch==1.0  # a reference for tests; what it depends on is not needed
	@touch $@ $(VENV)/.installed
