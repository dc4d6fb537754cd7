# Each target does all its own set-up in .venv. Variables: PYTHON, TARGETS (GPU architectures to compile for).
PYTHON  ?= python3
TARGETS ?= sm90 sm100 sm120
BIN     := .venv/bin
ENGINE  := engines/flint-nano-sm120

SOURCES := pyproject.toml CMakeLists.txt plugins
# What of the library is compiled: the architectures, in a file that is as old as the library.
COMPILED := build/.compiled
empty :=
space := $(empty) $(empty)

.PHONY: help setup plugins demo test test-gpu sanitize lint format bench bench-gpu clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

.venv/.created:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "cmake>=3.26" "ninja>=1.11" "numpy>=2.0"
	@touch $@

setup: plugins  ## Make .venv with everything in it and compile the plugin library

plugins: .venv/.created  ## Compile the plugin library for TARGETS
	@mkdir -p build; [ -e $(COMPILED) ] || touch -d @0 $(COMPILED)
	@if [ -n "$$(find $(SOURCES) -type f -newer $(COMPILED) -not -name '*.py[co]' | head -1)" ] || \
	    ! { $(foreach t,$(TARGETS),grep -qw $(t) $(COMPILED) &&) true; }; then \
	  echo "Installing into .venv and compiling the plugin library for $(TARGETS)"; \
	  $(BIN)/pip install --quiet --no-build-isolation --editable ".[reference,rtx,cuda,dev]" \
	    --config-settings=cmake.define.FLINT_TARGETS="$(subst $(space),;,$(TARGETS))" && echo $(TARGETS) > $(COMPILED); \
	fi

demo: TARGETS := sm120
demo: plugins  ## Build an engine from flint-nano and ask it something
	@rm -rf $(ENGINE)
	$(BIN)/build-engine tests/data/flint-nano --weights nvfp4 --target sm120 -o $(ENGINE)
	$(BIN)/run-engine generate $(ENGINE) "What is 7 + 5?" --temperature 0

test: plugins  ## CPU tests
	$(BIN)/pytest -m "not gpu"

test-gpu: plugins  ## Tests that need a CUDA device, and torch with CUDA
	$(BIN)/pytest -m gpu

# A process a test: behind a process's first error memcheck would say nothing true. Processors are what it waits for, not
# the GPU.
SANITIZE_JOBS ?= $(shell nproc)
sanitize: plugins  ## compute-sanitizer's memcheck and racecheck over GPU tests of small shapes, SANITIZE_JOBS at a time
	@for tool in memcheck racecheck; do sed "s/^/$$tool /" tests/gpu/sanitizer.txt; done \
	  | BIN=$(BIN) xargs -P $(SANITIZE_JOBS) -L 1 sh -c 'log=$$(compute-sanitizer --tool "$$0" --error-exitcode 1 \
	    "$$BIN/python" -m pytest -q -p no:cacheprovider "$$1" </dev/null 2>&1) && echo "$$0 $$1: clean" \
	    || { echo "$$0 $$1:"; echo "$$log"; exit 1; }'

lint: plugins  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find plugins \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' \) -print0 \
	  | xargs -0 $(BIN)/clang-format --dry-run -Werror

format: plugins  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	find plugins \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' \) -print0 \
	  | xargs -0 $(BIN)/clang-format -i

bench: plugins  ## Repacking speed and memory; the host's cost of a step
	$(BIN)/python -m tests.bench.bench_repack
	$(BIN)/python -m tests.bench.bench_host
	$(BIN)/python -m tests.bench.bench_core

bench-gpu: plugins  ## The full-size model and its ops on this machine's GPU (needs torch with CUDA)
	$(BIN)/python -m tests.bench.full_size build/skeleton
	$(BIN)/python -m tests.bench.bench_gpu --skeleton build/skeleton --weights nvfp4 bf16 --ops --sample --load \
	  --commit $$(git rev-parse --short HEAD) --out tests/bench/results
	$(BIN)/python -m tests.bench.bench_serving --skeleton build/skeleton --commit $$(git rev-parse --short HEAD) \
	  --out tests/bench/results

clean:  ## Remove what the targets made, but not .venv
	rm -rf build $(ENGINE)
