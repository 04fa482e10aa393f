# `make demo`, `make test` and `make docs`. Each sets up its own virtual environment first; Python and make are enough.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python -m

.PHONY: demo test lint docs audit clean

demo: $(VENV)/.installed
	$(RUN) warpnorm demo

test: lint
	$(RUN) pytest tests/cpu tests/compiled tests/native tests/gpu -n 2 --dist worksteal
	TRITON_INTERPRET=1 $(RUN) pytest tests/interpreter -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

docs: $(VENV)/.documented
	$(RUN) sphinx --quiet --fresh-env --fail-on-warning --keep-going --doctree-dir build/doctrees docs site
	@echo "the site is $(CURDIR)/site/index.html"

# Known weaknesses and licences of what is installed, which asks a database elsewhere: no part of `make test`
audit: $(VENV)/.audited
	$(VENV)/bin/pip-audit --local --skip-editable
	$(VENV)/bin/pip-licenses --from=mixed --order=license --fail-on='$(REFUSED_LICENCES)'

REFUSED_LICENCES := GNU General Public License v3 (GPLv3);GNU Affero General Public License v3;GPL-3.0-only;AGPL-3.0-only

PIP := $(RUN) pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
INSTALL := $(PIP) '.[test]'

$(VENV)/.installed: pyproject.toml constraints.txt constraints-triton.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints-triton.txt || $(INSTALL)
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(PIP) '.[docs]'
	touch $@

$(VENV)/.audited: $(VENV)/.installed
	$(PIP) '.[audit]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
