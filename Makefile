# Every target makes its own .venv, and renews it when pyproject.toml or the pinned versions changed. All packages are checked by
# the checksums in hashes.txt, except for torch and what its build brings, which differ by machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Keep compiled files, whatever the shell says: tests start hundreds of commands, each of which would compile all it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-switches test-ci test-slow lint bench weight golden clean

demo: .venv/.ready
	$(BIN)/difflm generate english --infill "My neighbour ___ every morning before work." -n 4 --seed 0
	@echo "To use difflm in this shell: source .venv/bin/activate"

# Two workers with one thread each: more threads than cores make torch slower, not faster.
test: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The same tests with every switch of the machine turned the other way (docs/architecture.md).
test-switches: .venv/.ready
	DIFFLM_SWITCHES=opposite OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# All of `test`, and what takes many seconds.
test-ci: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

# FUZZ: seconds of fuzzing what reads files, requests and patterns.
test-slow: .venv/.ready
	OMP_NUM_THREADS=1 DIFFLM_FUZZ=$(FUZZ) $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/python -m benchmarks.speed.sampling

# How heavy the code is: lines, circles, kinds and walks, with the goals; tests/whole/test_weight.py holds the figures.
weight: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.weight

# Write the golden texts, losses and gradients of this machine anew (tests/support/golden.py): only for changes on purpose.
golden: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.golden

.venv/.ready: pyproject.toml models/english/pyproject.toml constraints.txt hashes.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "difflm needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	@echo "Installing difflm and its requirements into .venv (once; a few minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) install --require-hashes --no-deps -r hashes.txt
	@$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@$(PIP) install --no-build-isolation -e '.[dev,plot,studio]' -e ./models/english -c constraints.txt
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src browser tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
