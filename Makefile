# Every target makes its own .venv, and renews it when pyproject.toml or the pinned versions changed. All packages are checked by
# the checksums in hashes.txt, except for torch and what its build brings, which differ by machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Keep compiled files, whatever the shell says: tests start hundreds of commands, each of which would compile all it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-switches test-ci test-slow lint bench weight golden clean

demo: .venv/.ready
	$(BIN)/difflm generate english --infill "We ___ because it was raining." -n 4 --seed 0
	@echo "To use difflm in this shell: source .venv/bin/activate"

# Two workers with one thread each: more threads than cores make torch slower, not faster.
test: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Tests of what depends on the machine, with every switch turned the other way (docs/architecture.md): what runs a network
# on a CPU by `Inference`, records, packs, rounds, divides work among threads, or asks the operating system.
SWITCHED := controls/test_guidance diffusion/test_token_sampling fast/test_eight_bit fast/test_few_places \
  fast/test_packed_weights fast/test_products fast/test_recorded fast/test_recorded_blocks fast/test_recorded_tokens \
  fast/test_replay generation/test_joining generation/test_loops generation/test_pipeline generation/test_ranking \
  methods/test_ar_diffusion methods/test_block_diffusion methods/test_cdcd methods/test_decoder_only \
  methods/test_flow_map methods/test_glyph_diffusion methods/test_latents models/test_open_doors \
  runtime/test_portable runtime/test_threads whole/test_machine whole/test_same_request
test-switches: .venv/.ready
	DIFFLM_SWITCHES=opposite OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(SWITCHED:%=tests/%.py)

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
