# `make demo`, `make test`, `make docs` and `make report` set up everything they need in .venv; again,
# they only redo what changed.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Without a GPU here CUDA kernels would compile for all of them, and run on none.
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
export PYG_FAST_CUDA ?= 0
endif
BUILD_INPUTS := $(shell find csrc -type f) setup.py setup.cfg pyproject.toml

.PHONY: demo test lint docs report clean

demo: $(VENV)/.demo
	$(BIN)/python examples/node_classification.py $(ARGS)

# In processes of one thread each.
test: $(VENV)/.test
	$(BIN)/python -m pytest tests -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html $(ARGS)

report: $(VENV)/.report
	$(BIN)/python -m benchmarks.report $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info pyg_fast/_C.abi3.so docs/_build
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Debian's python3 comes without the venv module's ensurepip; virtualenv brings its own pip.
$(VENV)/.made:
	@rm -rf $(VENV)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'pyg_fast needs Python >= 3.10: make PYTHON=python3.12 ...' >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -c 'import virtualenv' 2>/dev/null; then $(PYTHON) -m virtualenv -q $(VENV); \
	else echo 'Python has no venv: install it, e.g. apt install python3-venv' >&2; exit 1; fi
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	$(BIN)/pip install '$(TORCH)'
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.docs $(VENV)/.report: $(VENV)/.%: $(VENV)/.torch $(BUILD_INPUTS)
	$(BIN)/pip install -e '.[$*]'
	@touch $@
