# Every target does its own set-up on a fresh machine: Python 3.10+, a C++17 compiler and make are all it needs.
# Set-up runs once, and again when the build or the pinned versions change.
#   make demo    train on the embedded digits, calibrate the widths between, print accuracy at every width
#   make test    the tests; `make slow` the long ones
#   make check   lint, format, types
#   make bench   time of a joint training step against a plain one

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
CPP := $(wildcard native/*.cpp native/*.h)
# An editable install remembers which folders were packages: a new one needs it renewed.
PACKAGES := $(wildcard src/anyprec/*/__init__.py)

# Two workers with one thread each: more threads only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --color=no

.PHONY: setup demo test slow check format bench clean

setup: $(READY)

# torch comes first and alone, at the one version of constraints.txt: left to the resolver, an open range in some
# other package may bring in gigabytes of GPU libraries.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(CPP) $(PACKAGES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation -e '.[train,dev]'
	touch $@

demo: $(READY)
	$(BIN)/anyprec train recipes/digits.toml --out runs/demo --overwrite
	$(BIN)/anyprec calibrate runs/demo --widths 3,5-7
	$(BIN)/anyprec evaluate runs/demo --widths 1-8,32

test: $(READY)
	$(PYTEST)

slow: $(READY)
	$(PYTEST) -m slow

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

bench: $(READY)
	$(BIN)/python bench/train_step.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
