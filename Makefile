# make demo: train a small GPT on two CPU ranks (or all GPUs) and watch the ladder choose a stage.
# make test: the whole test suite in an environment of its own.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
PIP_FLAGS := --quiet --disable-pip-version-check

export OMP_NUM_THREADS := 1

.PHONY: demo test clean

TORCH := $(shell grep -E '^torch==' constraints.txt)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# torch comes first and by itself. Without an NVIDIA GPU a CPU build is looked for where pip looks anyway, then in
# PyTorch's own index of them; the default build would download several gigabytes.
define install
	$(PYTHON) -m venv --clear $(1)
	if command -v nvidia-smi >/dev/null; then \
	    $(1)/bin/python -m pip install $(PIP_FLAGS) "$(TORCH)"; \
	else \
	    $(1)/bin/python -m pip install $(PIP_FLAGS) "$(TORCH)+cpu" 2>/dev/null \
	        || $(1)/bin/python -m pip install $(PIP_FLAGS) "$(TORCH)+cpu" --index-url "$(TORCH_CPU_INDEX)" \
	        || $(1)/bin/python -m pip install $(PIP_FLAGS) "$(TORCH)"; \
	fi
	$(1)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e ".$(2)"
	touch $(1)/.installed
endef

.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing into .venv (a few minutes the first time)"
	$(call install,.venv,)

.venv-test/.installed: pyproject.toml constraints.txt
	@echo "Installing into .venv-test (a few minutes the first time)"
	$(call install,.venv-test,[dev])

demo: .venv/.installed
	.venv/bin/python examples/demo.py

test: .venv-test/.installed
	.venv-test/bin/ruff check .
	.venv-test/bin/mypy
	.venv-test/bin/python -m pytest

clean:
	rm -rf .venv .venv-test build dist *.egg-info lightning_logs zero_ladder
