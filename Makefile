# Two commands set a fresh machine up: `make demo` and `make test`. Both build .venv once and reuse it.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
TORCH := $(shell grep -m1 '^torch==' constraints.txt)
# Several processes share the cores: spinning OpenMP threads cost more than they bring.
export OMP_NUM_THREADS ?= 1

.PHONY: setup setup-dev demo lint unit test test-slow clean

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# torch first and by exact version: a later requirement must never pull in another build.
$(VENV)/.installed: constraints.txt setup.cfg
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(PY) -m experiments.demo

lint: setup-dev
	$(PY) -m ruff check .
	$(PY) -m mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports setup.cfg

unit: setup-dev
	$(PY) -m pytest -n 2 --dist loadfile

test: lint unit

test-slow: setup-dev
	$(PY) -m pytest -m slow --timeout 3600

clean:
	rm -rf $(VENV) runs build *.egg-info
