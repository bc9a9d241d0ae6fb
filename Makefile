# `make demo` and `make test` work from a clean clone: they need Python 3.11+ and a C++ compiler.

PYTHON ?= python3
# Test processes; 0 runs the tests in one, as on a GPU.
JOBS ?= 2
# For pytest, e.g. ARGS="-k matmul".
ARGS ?=
# Editable, so that only changes of the C++ code need a build. `EDITABLE=` installs what users get.
EDITABLE ?= -e
# cuda12 or cuda13, as the driver says; nothing where there is no NVIDIA GPU.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/cuda\1/p')
# JAX_SWIGLU_REQUIRE_PARITY=1 adds tests against PyTorch and transformers, which are large downloads.
PARITY := $(JAX_SWIGLU_REQUIRE_PARITY:1=parity)
# What test-matrix runs on.
PYTHONS ?= python3.11 python3.12 python3.13
JAXES ?= newest 0.9.0

BIN := $(CURDIR)/.venv/bin
SOURCES := pyproject.toml $(wildcard ffi/*) \
           $(if $(EDITABLE),,$(shell find jax_swiglu -name '*.py' -o -name '*.json'))
INSTALLED := .venv/.installed$(EDITABLE)$(PARITY)

.PHONY: demo test test-matrix lint clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_lm.py

# From tests/, where no ./jax_swiglu hides the installed package from the tests' subprocesses.
test: $(INSTALLED)
	cd tests && $(BIN)/pytest -n $(JOBS) $(ARGS)

test-matrix:
	.ci/matrix "$(PYTHONS)" "$(JAXES)" $(JOBS)

lint: $(INSTALLED) .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/clang-format --dry-run -Werror ffi/*.cc ffi/*.h

clean:
	rm -rf .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11+ is needed; \
	this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

$(INSTALLED): $(SOURCES) | $(BIN)/python
	@rm -f .venv/.installed*
	$(BIN)/python -m pip install $(EDITABLE) '.[test,examples$(addprefix $(comma),$(CUDA) $(PARITY))]'
	@touch $@

.venv/.lint: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --group lint
	@touch $@

comma := ,
