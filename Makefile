# Every target does its own set-up, and does it once: the stamp is as new as pyproject.toml.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: setup verify test lint faults conformance bare-npu clean

# The main job: a small GLM-4.5V is trained on real pictures over 4 ranks, and every step is judged.
verify: setup
	$(BIN)/glmv verify --world-size 4 --steps 20 --out report

# All tests, after linter, types and import rules.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# Put every seeded fault in, and see its tests turn red.
faults: setup
	$(BIN)/glmv faults run

# The contract of the NPU's operators against the real torch_npu wheel, which is put into build/.
conformance: setup
	$(BIN)/python -m glmv.verify.wheel

# torch_npu in the main environment and no CANN: the CPU works as before.
bare-npu: setup
	$(BIN)/python -m glmv.verify.wheel.bare

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glmv needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable ".[dev,report]"
	touch $@

clean:
	rm -rf $(VENV) report build
