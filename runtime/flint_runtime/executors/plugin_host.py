"""The plugin-host executor: runs an engine's graphs on the GPU through the plugins alone, without TensorRT or torch.

One step is one copy of its small arrays to the GPU, one run of the graph (for decode one CUDA graph per shape) and one
copy of the drawn tokens back. Prefill and decode share weights, pools, arena and staging memory.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flint_plugins.library import ENVIRONMENT_VARIABLE, LibraryError, check_library, find_library
from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, ResourceError, UnsupportedError
from flint_runtime.executors import cuda, gpu_memory
from flint_runtime.executors.base import PROMPT_FLAG, Executor, StepResult
from flint_runtime.executors.graph_file import GraphFile, load_graph
from flint_runtime.executors.host_graph import (
    build_graph,
    input_shapes,
    page_table_columns,
    prepare_graph,
    size_ranges,
)
from flint_runtime.executors.host_library import HostError, HostGraph, HostLibrary, Run
from flint_runtime.executors.staging import (
    RESULT_ARRAYS,
    Array,
    Sizes,
    largest_sizes,
    pack,
    page_table_width,
    step_arrays,
)
from flint_runtime.executors.step import STEP_ARRAYS, Float32, Pools, Step, check_step, sampling_states
from flint_runtime.executors.weight_loader import plan_weights, upload_weights
from flint_runtime.manifest import PHASES, Phase, ring_tokens

_BF16_BYTES = 2
_PREPARED_RUNS = 256
"""Shapes whose bindings are kept; the CUDA graphs themselves are in the host."""


@dataclass(frozen=True)
class _Graph:
    file: GraphFile
    graph: HostGraph


@dataclass(frozen=True)
class _Prepared:
    """Everything of a step that follows from its phase and sizes."""

    run: Run
    inputs: dict[str, Array]
    """Views of the pinned memory that is copied to the GPU."""
    input_bytes: int
    results: dict[str, Array]
    result_bytes: int


class PluginHostExecutor(Executor):
    """Runs an engine on the current CUDA device. Close it to free the GPU memory at once."""

    def __init__(
        self, engine: Engine, library: Path | None = None, progress: Callable[[int], None] | None = None
    ) -> None:
        """Load the graphs and weights of an opened engine.

        Args:
            library: plugin library; None for the one that FLINT_PLUGINS_LIBRARY names, or else the engine's own.
            progress: called with the number of bytes of weights read since the last call, from several threads.
        Raises:
            UnsupportedError: no cuda-bindings or no CUDA device here.
            EngineError: the engine is damaged or was built for another GPU or version.
            ResourceError: the weights do not fit the GPU.
        """
        self.engine = engine
        self._pools = Pools(0, 0, 0)
        self._pool_memory: cuda.DeviceMemory | None = None
        self._states: dict[str, int] = {}
        self._prepared: OrderedDict[tuple[Phase, Sizes], _Prepared] = OrderedDict()
        problem = cuda.device_problem()
        if problem:
            raise UnsupportedError(f"The plugin-host executor needs an NVIDIA GPU, but {problem}")
        library = library or _default_library(engine)
        self._check_device(library)
        host = HostLibrary(library)
        layout = plan_weights(engine.weight_paths())
        self._graphs = {phase: self._load(host, phase, layout.tensors.keys()) for phase in PHASES}
        self._columns = page_table_columns(engine.manifest.limits)
        most = largest_sizes(engine.manifest.limits, self._columns)
        staging, results = pack(STEP_ARRAYS, most), pack(RESULT_ARRAYS, most)
        arena_bytes = max(graph.graph.arena_bytes for graph in self._graphs.values())
        gpu_memory.check_open(engine, layout.size, arena_bytes)
        try:
            self._weights = cuda.DeviceMemory(layout.size)
            self._arena = cuda.DeviceMemory(arena_bytes)
            self._staging = cuda.DeviceMemory(staging.size)
            self._result_memory = cuda.DeviceMemory(results.size)
            self._pinned_staging = cuda.PinnedMemory(staging.size)
            self._pinned_results = cuda.PinnedMemory(results.size)
        except cuda.CudaError as error:
            raise gpu_memory.open_error(engine, layout.size, arena_bytes, str(error)) from None
        self._stream = cuda.Stream()
        self._weight_addresses = {name: self._weights.address + at for name, at in layout.offsets.items()}
        upload_weights(layout, self._weights.address, progress)

    @classmethod
    def open(cls, directory: Path) -> PluginHostExecutor:
        """Open an engine directory on the current CUDA device; raises what the constructor does."""
        return cls(Engine.open(directory))

    @property
    def arena_bytes(self) -> int:
        """GPU memory for activations and workspace, shared by both phases."""
        return self._arena.size

    def close(self) -> None:
        """Free everything; the executor is of no use afterwards."""
        self._prepared.clear()
        self._stream.wait()
        for graph in self._graphs.values():
            graph.graph.close()
        for memory in (self._weights, self._arena, self._staging, self._result_memory, self._pool_memory):
            if memory:
                memory.free()
        self._pinned_staging.free()
        self._pinned_results.free()
        self._stream.free()

    def _check_device(self, library: Path) -> None:
        manifest = self.engine.manifest
        architecture = cuda.device_architecture()
        self.engine.check_device(architecture)
        try:
            info = check_library(library, version=manifest.plugins_version, layout_version=manifest.layout_version)
        except LibraryError as error:
            raise EngineError(str(error)) from None
        if architecture not in info.architectures:
            raise EngineError(
                f"{library} holds GPU code for {', '.join(info.architectures)}; this GPU is {architecture}. Rebuild "
                f"the engine with: build-engine CHECKPOINT --target {architecture} -o DIR"
            )

    def _load(self, host: HostLibrary, phase: Phase, weights: Container[str]) -> _Graph:
        """Load a phase's graph and check that everything it reads will be there."""
        path = self.engine.graph_path(phase)
        file = load_graph(path)
        known = {*STEP_ARRAYS, *sampling_states(self.config.vocab_size)}
        missing = sorted(n for n in file.inputs if n not in known and not n.startswith("kv.") and n not in weights)
        if missing:
            raise EngineError(
                f"Engine {self.engine.directory}: no weight file holds {', '.join(missing[:5])}, an input of "
                f"{phase}.onnx. Rebuild it."
            )
        try:
            graph = build_graph(host, file)
            prepare_graph(graph, file, size_ranges(self.config, self.limits, phase))
        except HostError as error:
            raise EngineError(f"{path}: {error}. Rebuild the engine.") from None
        return _Graph(file, graph)

    # --- States ---------------------------------------------------------------------------------------------------

    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """Allocate the states in one piece; see `Executor.allocate`."""
        config = self.config
        pools = Pools(pages, slots, sample_slots)
        per_head = config.num_key_value_heads * 2 * config.head_dim * _BF16_BYTES
        sizes = {
            f"kv.{layer}": per_head
            * (pages * PAGE_TOKENS if config.is_full(layer) else slots * ring_tokens(config.sliding_window))
            for layer in range(config.num_hidden_layers)
        }
        sampling = sampling_states(config.vocab_size)
        sizes |= {name: sample_slots * state.row_bytes for name, state in sampling.items()}
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // 256) * 256
        self._prepared.clear()
        self._pools, self._states = Pools(0, 0, 0), {}
        if self._pool_memory:
            self._pool_memory.free()
            self._pool_memory = None
        gpu_memory.check_pools(self.engine, pools, end, self._weights.size, self._arena.size)
        try:
            self._pool_memory = cuda.DeviceMemory(end)
        except cuda.CudaError as error:
            raise gpu_memory.pools_error(self.engine, pools, self._weights.size, self._arena.size, str(error)) from None
        self._states = {name: self._pool_memory.address + offset for name, offset in offsets.items()}
        for name, state in sampling.items():  # 0 or -1: every byte is the same
            self._stream.fill(self._states[name], state.initial & 0xFF, sizes[name])
        self._stream.wait()
        self._pools = pools

    @property
    def pools(self) -> Pools:
        """Sizes that were allocated."""
        return self._pools

    def poison(self) -> None:
        """For tests: fill every KV pool with NaN, so that reading what was never written shows."""
        assert self._pool_memory is not None
        size = self._states["token_counts"] - self._pool_memory.address
        self._stream.fill(self._pool_memory.address, 0xFF, size)
        self._stream.wait()

    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Set a row of token_counts; see `Executor.begin_sequence`."""
        if not 0 <= sample_slot < self._pools.sample_slots:
            raise ResourceError(f"sample slot {sample_slot} is not one of the {self._pools.sample_slots} allocated")
        size = self.config.vocab_size
        counts = np.bincount(np.asarray(generated, np.int64), minlength=size).astype(np.int32)
        counts[np.unique(np.asarray(prompt, np.int64))] += PROMPT_FLAG
        self._stream.upload(
            self._states["token_counts"] + sample_slot * counts.nbytes, counts.ctypes.data, counts.nbytes
        )
        self._stream.wait()

    # --- Steps ----------------------------------------------------------------------------------------------------

    def run(self, phase: Phase, step: Step, *, logits: bool = False) -> StepResult:
        """Run one step; see `Executor.run`."""
        check_step(step, phase, self.config, self.limits, self._pools)
        columns = min(step.page_table.shape[1], self._columns)
        width = page_table_width(columns, self._columns)
        sizes = Sizes(len(step.token_ids), len(step.seq_lens), width, len(step.logits_rows))
        prepared = self._prepare(phase, sizes)
        for name, view in prepared.inputs.items():
            if name == "page_table":
                view[:, :columns] = step.page_table[:, :columns]
                view[:, columns:] = 0
            else:
                view[...] = getattr(step, name)
        stream = self._stream
        stream.upload(self._staging.address, self._pinned_staging.address, prepared.input_bytes)
        prepared.run.launch(stream.handle, use_graph=phase == "decode")
        stream.download(self._pinned_results.address, self._result_memory.address, prepared.result_bytes)
        wanted = self._download_logits(phase, sizes.rows) if logits else None
        stream.wait()
        # Copies: the pinned memory is the next step's.
        results = {name: view.copy() for name, view in prepared.results.items()}
        return StepResult(**results, logits=wanted)

    def _download_logits(self, phase: Phase, rows: int) -> Float32:
        found = np.empty((rows, self.config.vocab_size), np.float32)
        address = self._arena.address + self._graphs[phase].graph.placement("logits").offset
        self._stream.download(found.ctypes.data, address, found.nbytes)
        return found

    def _prepare(self, phase: Phase, sizes: Sizes) -> _Prepared:
        """Bindings and staging views for a step's sizes; kept, as most steps look like the one before."""
        key = (phase, sizes)
        if found := self._prepared.get(key):
            self._prepared.move_to_end(key)
            return found
        graph = self._graphs[phase]
        arrays, results = pack(step_arrays(graph.file.inputs), sizes), pack(RESULT_ARRAYS, sizes)
        addresses = {
            **self._weight_addresses,
            **self._states,
            **arrays.addresses(self._staging.address),
            **results.addresses(self._result_memory.address),
        }
        known = {
            **sizes.by_name(),
            "pages": self._pools.pages,
            "slots": self._pools.slots,
            "sample_slots": self._pools.sample_slots,
        }
        prepared = _Prepared(
            graph.graph.bind(input_shapes(graph.file, known), addresses, self._arena.address),
            arrays.views(self._pinned_staging.array),
            arrays.size,
            results.views(self._pinned_results.array),
            results.size,
        )
        if len(self._prepared) >= _PREPARED_RUNS:
            self._prepared.popitem(last=False)
        self._prepared[key] = prepared
        return prepared


def _default_library(engine: Engine) -> Path:
    """The library that a developer's environment names, or the engine's own. Raises LibraryError, EngineError."""
    return find_library() if os.environ.get(ENVIRONMENT_VARIABLE) else engine.library_path


def problem_here(engine: Engine) -> str | None:
    """Why this executor cannot run an engine here, or None. Loads no weights."""
    problem = cuda.device_problem()
    if problem:
        return problem
    try:
        engine.check_device(cuda.device_architecture())
        path, manifest = _default_library(engine), engine.manifest
        check_library(path, version=manifest.plugins_version, layout_version=manifest.layout_version)
    except (EngineError, LibraryError, cuda.CudaError) as error:
        return str(error)
    return None
