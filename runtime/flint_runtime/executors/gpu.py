"""What the GPU executors share: device checks, weights, states, staging, results. Who runs the graph is a subclass.

One step is one copy of its small arrays to the GPU, one run of the graph and one copy of the drawn tokens back, all on
one stream. The host waits for none of it but in `Pending.result`. What a step still needs while the host prepares the
next one is there MAX_IN_FLIGHT times: pinned memory for its arrays and results, and an event.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flint_plugins.library import ENVIRONMENT_VARIABLE, LibraryError, check_library, find_library, library_for_host
from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, UnsupportedError
from flint_runtime.executors import cuda, gpu_memory
from flint_runtime.executors.base import MAX_IN_FLIGHT, Executor, Pending, StepResult, too_many_in_flight
from flint_runtime.executors.engine_check import load_graphs
from flint_runtime.executors.graph_file import GraphFile
from flint_runtime.executors.staging import (
    RESULT_ARRAYS,
    Array,
    Sizes,
    largest_sizes,
    pack,
    page_table_columns,
    page_table_width,
)
from flint_runtime.executors.states import (
    StateLayout,
    States,
    bias_row,
    check_copies,
    check_sample_slot,
    count_row,
    mask_row,
    pool_sizes,
)
from flint_runtime.executors.step import (
    Float32,
    Int32,
    Pools,
    Step,
    StepChecker,
    sampling_states,
    step_block,
)
from flint_runtime.executors.weight_loader import plan_weights, upload_weights
from flint_runtime.manifest import Phase

Launch = Callable[[], object]
"""Puts a run of the graph on the executor's stream and returns at once."""

_PREPARED_STEPS = 256
"""Sizes whose bindings are kept."""
_UPLOAD_ROWS = 8
"""Rows of one vocabulary that may be on their way to the sampling states before the host must wait."""


class _Slot:
    """What one step in flight has for itself."""

    def __init__(self, index: int, staging_bytes: int, result_bytes: int) -> None:
        self.index = index
        self.staging = cuda.PinnedMemory(staging_bytes)
        self.results = cuda.PinnedMemory(result_bytes)
        self.finished = cuda.Event()

    def free(self) -> None:
        self.staging.free()
        self.results.free()


@dataclass(frozen=True)
class _Prepared:
    """Everything of a step that follows from its phase and sizes; the lists have an entry per slot."""

    launch: Launch
    words: list[Int32]
    """Where the step's packed arrays go before they are copied to the GPU."""
    page_table: list[Int32]
    input_bytes: int
    results: list[dict[str, Array]]
    result_bytes: int


class _GpuPending(Pending):
    def __init__(self, slot: _Slot, results: dict[str, Array], free_slots: list[_Slot], logits: _Logits | None) -> None:
        self._slot, self._results, self._free_slots, self._logits = slot, results, free_slots, logits
        self._outcome: StepResult | cuda.CudaError | None = None

    def done(self) -> bool:
        """See `Pending.done`."""
        return self._outcome is not None or self._slot.finished.done()

    def result(self) -> StepResult:
        """See `Pending.result`."""
        if self._outcome is None:
            try:
                self._slot.finished.wait()
                logits = self._logits.take() if self._logits else None
                # Copies: the pinned memory is that of a later step.
                self._outcome = StepResult(**{n: view.copy() for n, view in self._results.items()}, logits=logits)
            except cuda.CudaError as error:
                self._outcome = error
            self._logits = None
            self._free_slots.append(self._slot)
        if isinstance(self._outcome, cuda.CudaError):
            raise self._outcome
        return self._outcome


class _Logits:
    """Pinned memory for some rows of one step's logits, from what earlier steps have left."""

    def __init__(self, rows: int, vocab_size: int, free: list[cuda.PinnedMemory]) -> None:
        """Take memory, or allocate some. Raises CudaError."""
        size = rows * vocab_size * 4
        fitting = [memory for memory in free if len(memory.array) >= size]
        if fitting:
            self.memory = min(fitting, key=lambda memory: len(memory.array))
            free.remove(self.memory)
        else:  # Rounded up: the next step may have another request's row.
            self.memory = cuda.PinnedMemory((1 << (rows - 1).bit_length()) * vocab_size * 4)
        self._free = free
        self.array: Float32 = self.memory.array[:size].view(np.float32).reshape(rows, vocab_size)

    def take(self) -> Float32:
        """A copy of the rows; the memory is free again."""
        found: Float32 = self.array.copy()
        self._free.append(self.memory)
        return found


class GpuExecutor(Executor):
    """Runs an engine on the CUDA device that was current when it was opened. Close it to free the memory at once."""

    name: ClassVar[str]
    """As --executor takes it."""

    def __init__(
        self, engine: Engine, library: Path | None = None, progress: Callable[[int], None] | None = None
    ) -> None:
        """Load the graphs and weights of an opened engine.

        Args:
            library: plugin library; None for the one that FLINT_PLUGINS_LIBRARY names, or else the engine's own.
            progress: called with the number of bytes of weights read since the last call, from several threads.
        Raises:
            UnsupportedError: something that the executor needs is not installed, or no CUDA device is here.
            EngineError: the engine is damaged or was built for another GPU or version.
            ResourceError: the weights do not fit the GPU.
        """
        self.engine = engine
        self._pools = Pools(0, 0, 0)
        self._state_memory: cuda.DeviceMemory | None = None
        self._state_addresses: dict[str, int] = {}
        self._prepared: OrderedDict[tuple[Phase, Sizes], _Prepared] = OrderedDict()
        self._free_logits: list[cuda.PinnedMemory] = []
        self._checker = StepChecker(self.config, self.limits, self._pools)
        self.check_here(engine, library)
        layout = plan_weights(engine.weight_paths())
        self.files: dict[Phase, GraphFile] = load_graphs(engine, layout.tensors)
        self._states = States(self.files.values())
        self._layout: StateLayout = self._states.layout(self._pools)
        arena_bytes = self._open_graphs(library or _default_library(engine))
        self._columns = page_table_columns(engine.manifest.limits)
        most = largest_sizes(self.limits, self._columns)
        staging_bytes = _block_bytes(most) + most.sequences * most.columns * 4
        result_bytes = pack(RESULT_ARRAYS, most.by_name()).size
        gpu_memory.check_open(engine, layout.size, arena_bytes)
        try:
            self._weights = cuda.DeviceMemory(layout.size)
            self._arena = cuda.DeviceMemory(arena_bytes)
            self._staging = cuda.DeviceMemory(staging_bytes)
            self._results = cuda.DeviceMemory(result_bytes)
            self._slots = [_Slot(index, staging_bytes, result_bytes) for index in range(MAX_IN_FLIGHT)]
            self._stream = cuda.Stream()
            self._uploads = cuda.UploadRing(self._stream, self.config.vocab_size * 4, _UPLOAD_ROWS)
        except cuda.CudaError as error:
            raise gpu_memory.open_error(engine, layout.size, arena_bytes, str(error)) from None
        self._free_slots = list(self._slots)
        self._weight_addresses = {name: self._weights.address + at for name, at in layout.offsets.items()}
        upload_weights(layout, self._weights.address, progress)

    @classmethod
    def open(cls, directory: Path) -> GpuExecutor:
        """Open an engine directory on the current CUDA device; raises what the constructor does."""
        return cls(Engine.open(directory))

    @classmethod
    def check_here(cls, engine: Engine, library: Path | None = None) -> None:
        """Raise UnsupportedError or EngineError where this executor cannot run the engine here. Loads no weights."""
        problem = cuda.device_problem()
        if problem:
            raise UnsupportedError(f"The {cls.name} executor needs an NVIDIA GPU, but {problem}.")
        architecture = cuda.device_architecture()
        engine.check_device(architecture)
        manifest = engine.manifest
        try:
            path = library or _default_library(engine)
            info = check_library(path, version=manifest.plugins_version, layout_version=manifest.layout_version)
        except LibraryError as error:
            raise EngineError(str(error)) from None
        if architecture not in info.architectures:
            raise EngineError(
                f"{path} holds GPU code for {', '.join(info.architectures)}; this GPU is {architecture}. Rebuild "
                f"the engine with: build-engine CHECKPOINT --target {architecture} -o DIR"
            )

    def close(self) -> None:
        """Free everything; the executor is of no use afterwards."""
        self._prepared.clear()
        self._stream.wait()
        self._close_graphs()
        for memory in (self._weights, self._arena, self._staging, self._results, self._state_memory):
            if memory:
                memory.free()
        for slot in self._slots:
            slot.free()
        for pinned in self._free_logits:
            pinned.free()
        self._free_logits.clear()
        self._uploads.free()
        self._stream.free()

    # --- Who runs the graph -------------------------------------------------------------------------------------------

    @abstractmethod
    def _open_graphs(self, library: Path) -> int:
        """Load what runs `files` and return the bytes of the arena that it needs, for both phases together.

        Raises:
            UnsupportedError, EngineError: it cannot be loaded.
        """

    @abstractmethod
    def _bind(self, phase: Phase, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> Launch:
        """What runs a phase's graph with these shapes of its dynamic inputs.

        Args:
            addresses: device addresses of all inputs, and of the outputs that a step returns but the logits.
        """

    @abstractmethod
    def _logits_offset(self, phase: Phase) -> int:
        """Where in the arena the logits lie after a run."""

    @abstractmethod
    def _close_graphs(self) -> None:
        """Free what `_open_graphs` loaded; nothing of it is running."""

    # --- States -------------------------------------------------------------------------------------------------------

    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """Allocate the states in one piece; see `Executor.allocate`."""
        pools = Pools(pages, slots, sample_slots)
        layout = self._states.layout(pools)
        self._drop_states()
        if layout.size > self._available():
            raise gpu_memory.pools_error(self.engine, pools, self._weights.size, self._arena.size)
        try:
            self._state_memory = cuda.DeviceMemory(layout.size)
        except cuda.CudaError as error:
            raise gpu_memory.pools_error(self.engine, pools, self._weights.size, self._arena.size, str(error)) from None
        start = self._state_memory.address
        self._state_addresses = {name: start + offset for name, offset in layout.offsets.items()}
        self._layout, self._pools = layout, pools
        self._checker = StepChecker(self.config, self.limits, pools)
        for name, state in sampling_states(self.config.vocab_size).items():  # 0 or -1: every byte is the same
            self._stream.fill(self._state_addresses[name], state.initial & 0xFF, sample_slots * state.row_bytes)

    def _drop_states(self) -> None:
        self._stream.wait()  # Steps that were submitted use them.
        self._prepared.clear()
        self._pools, self._state_addresses = Pools(0, 0, 0), {}
        self._checker = StepChecker(self.config, self.limits, self._pools)
        if self._state_memory:
            self._state_memory.free()
            self._state_memory = None

    @property
    def pools(self) -> Pools:
        """Sizes that were allocated."""
        return self._pools

    def memory_available(self) -> int:
        """Bytes that `allocate` may take: what is free, and what the present states hold."""
        return self._available() + (self._state_memory.size if self._state_memory else 0)

    def _available(self) -> int:
        return max(0, cuda.memory_info()[0] - gpu_memory.HEADROOM_BYTES)

    def poison(self) -> None:
        """For tests: fill every KV pool with NaN, so that reading what was never written shows."""
        assert self._state_memory is not None
        self._stream.fill(self._state_memory.address, 0xFF, self._layout.sampling_offset)

    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Reset a sample slot; see `Executor.begin_sequence`."""
        check_sample_slot(sample_slot, self._pools)
        if len(prompt) or len(generated):
            self._uploads.upload(
                self._row("token_counts", sample_slot), count_row(self.config.vocab_size, prompt, generated)
            )
        else:
            self._fill("token_counts", sample_slot, 0)
        self._fill("logit_bias", sample_slot, 0)
        self._fill("token_mask", sample_slot, 0xFF)

    def set_logit_bias(self, sample_slot: int, bias: Mapping[int, float]) -> None:
        """Replace a slot's bias; see `Executor.set_logit_bias`."""
        check_sample_slot(sample_slot, self._pools)
        if bias:
            self._uploads.upload(self._row("logit_bias", sample_slot), bias_row(self.config.vocab_size, bias))
        else:
            self._fill("logit_bias", sample_slot, 0)

    def set_token_mask(self, sample_slot: int, mask: npt.NDArray[np.int32 | np.uint32]) -> None:
        """Replace a slot's mask; see `Executor.set_token_mask`."""
        check_sample_slot(sample_slot, self._pools)
        self._uploads.upload(self._row("token_mask", sample_slot), mask_row(self.config.vocab_size, mask))

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy ring slots; see `Executor.copy_slots`."""
        check_copies(sources, targets, self._pools)
        rings = self._states.rings()
        if not rings:
            return
        # The rings of all layers stand behind one another, each as large as the next: one copy moves a slot of all.
        first, width = self._state_addresses[rings[0]], self._layout.row_bytes[rings[0]]
        pitch = self._layout.offsets[rings[1]] - self._layout.offsets[rings[0]] if len(rings) > 1 else width
        for source, target in zip(sources, targets, strict=True):
            self._stream.copy_rows(first + target * width, first + source * width, width, len(rings), pitch)

    def _row(self, state: str, sample_slot: int) -> int:
        """Address of a slot's row of a sampling state."""
        return self._state_addresses[state] + sample_slot * self._layout.row_bytes[state]

    def _fill(self, state: str, sample_slot: int, byte: int) -> None:
        self._stream.fill(self._row(state, sample_slot), byte, self._layout.row_bytes[state])

    # --- Steps --------------------------------------------------------------------------------------------------------

    def submit(self, phase: Phase, step: Step, *, logits: bool | Sequence[int] = False) -> Pending:
        """Queue one step; see `Executor.submit`."""
        if not self._free_slots:
            raise too_many_in_flight()
        self._checker.check(step, phase)
        slot, stream = self._free_slots[-1], self._stream
        rows = range(len(step.logits_rows)) if logits is True else logits or ()
        wanted = _Logits(len(rows), self.config.vocab_size, self._free_logits) if rows else None
        prepared = self._stage(phase, step, slot)
        stream.upload(self._staging.address, slot.staging.address, prepared.input_bytes)
        prepared.launch()
        stream.download(slot.results.address, self._results.address, prepared.result_bytes)
        if wanted:
            self._download_logits(phase, rows, wanted)
        slot.finished.record(stream)
        self._free_slots.pop()
        return _GpuPending(slot, prepared.results[slot.index], self._free_slots, wanted)

    def discard(self) -> None:
        """See `Executor.discard`."""
        self._stream.wait()
        self._free_slots = list(self._slots)

    def launcher(self, phase: Phase, step: Step) -> Launch:
        """For measurements: what runs the graph alone, with the arrays of `step`, which it has run already."""
        self.run(phase, step)
        return self._prepare(phase, self._sizes(step)).launch

    def _sizes(self, step: Step) -> Sizes:
        width = page_table_width(min(step.page_table.shape[1], self._columns), self._columns)
        return Sizes(len(step.token_ids), len(step.seq_lens), width, len(step.logits_rows))

    def _stage(self, phase: Phase, step: Step, slot: _Slot) -> _Prepared:
        """Write a step's arrays to a slot's pinned memory."""
        prepared = self._prepare(phase, self._sizes(step))
        prepared.words[slot.index][:] = step.words()
        table, columns = prepared.page_table[slot.index], min(step.page_table.shape[1], self._columns)
        table[:, :columns] = step.page_table[:, :columns]
        table[:, columns:] = 0
        return prepared

    def _download_logits(self, phase: Phase, rows: Sequence[int], target: _Logits) -> None:
        """Copy rows of the logits, neighbours at once."""
        source, row_bytes = self._arena.address + self._logits_offset(phase), self.config.vocab_size * 4
        first = 0
        for index in range(1, len(rows) + 1):
            if index == len(rows) or rows[index] != rows[index - 1] + 1:
                start, size = source + rows[first] * row_bytes, (index - first) * row_bytes
                self._stream.download(target.memory.address + first * row_bytes, start, size)
                first = index

    def _prepare(self, phase: Phase, sizes: Sizes) -> _Prepared:
        """Bindings and views for a step's sizes; kept, as most steps look like the one before."""
        key = (phase, sizes)
        if found := self._prepared.get(key):
            self._prepared.move_to_end(key)
            return found
        block, _ = step_block(sizes.tokens, sizes.sequences, sizes.rows)
        results = pack(RESULT_ARRAYS, sizes.by_name())
        table_bytes = sizes.sequences * sizes.columns * 4
        addresses = {
            **self._weight_addresses,
            **self._state_addresses,
            **block.addresses(self._staging.address),
            "page_table": self._staging.address + block.size,
            **results.addresses(self._results.address),
        }
        shapes = self.files[phase].dynamic_shapes({**sizes.by_name(), **pool_sizes(self._pools)})
        staging = [slot.staging.array for slot in self._slots]
        prepared = _Prepared(
            self._bind(phase, shapes, addresses),
            [memory[: block.size].view(np.int32) for memory in staging],
            [
                memory[block.size : block.size + table_bytes].view(np.int32).reshape(sizes.sequences, sizes.columns)
                for memory in staging
            ],
            block.size + table_bytes,
            [results.views(slot.results.array) for slot in self._slots],
            results.size,
        )
        if len(self._prepared) >= _PREPARED_STEPS:
            self._prepared.popitem(last=False)
        self._prepared[key] = prepared
        return prepared


def _block_bytes(sizes: Sizes) -> int:
    return step_block(sizes.tokens, sizes.sequences, sizes.rows)[0].size


def _default_library(engine: Engine) -> Path:
    """The library that a developer's environment names, or else the engine's. Raises LibraryError, EngineError."""
    return find_library() if os.environ.get(ENVIRONMENT_VARIABLE) else library_for_host(engine.library_path)
