"""A CUDA runtime whose device memory is host memory and whose streams run late, and a plugin host of reference ops.

With both, everything of a GPU executor but the kernels runs without a GPU: the upload of weights, where things lie,
what is copied, which addresses and shapes the graph is given. What is put on a stream runs only when somebody waits for
it, so that a wait in the wrong place, or memory that is written to too early, shows.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flint_plugins.ops import OPS, DType
from flint_runtime.executors.graph_file import GraphFile
from flint_runtime.executors.host_library import HostGraph, Run, RunKind
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference_ops import REFERENCE_OPS
from flint_runtime.executors.reference_weights import WeightCache

TORCH_TYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i8": torch.int8,
}  # fmt: skip


class _Error(Enum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorNotReady = 600  # noqa: N815
    cudaErrorLaunchFailure = 719  # noqa: N815


class FakeCuda:
    """Stands for the module cuda.bindings.runtime. Copies are checked against the allocations."""

    cudaError_t = _Error  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815
    cudaEventDisableTiming = 2  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)  # noqa: N815
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrComputeCapabilityMajor="major", cudaDevAttrComputeCapabilityMinor="minor"
    )

    def __init__(self, total: int = 1 << 30, capability: tuple[int, int] = (9, 0)) -> None:
        self.total, self.capability = total, dict(zip(("major", "minor"), capability, strict=True))
        self.device: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.uploads = self.downloads = self.waits = self.replays = 0
        self.fail_waits = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(7)
        self._queues: defaultdict[int, deque[Callable[[], None]]] = defaultdict(deque)
        self._events: dict[int, int] = {}
        """Stream of each event that is recorded and not reached."""
        self._captures: dict[int, list[Callable[[], None]]] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}

    # --- Memory ---------------------------------------------------------------------------------------------------

    def _allocate(self, size: int, where: dict[int, np.ndarray]) -> int:
        memory = np.full(size + 256, 0xCD, np.uint8)
        address: int = -(-memory.ctypes.data // 256) * 256
        with self._lock:
            where[address] = memory[address - memory.ctypes.data :][:size]
        return address

    @property
    def used(self) -> int:
        return sum(len(memory) for memory in self.device.values())

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """Device bytes, which must lie in one allocation."""
        return self._find(self.device, address, size)

    def _find(self, where: dict[int, np.ndarray], address: int, size: int) -> np.ndarray:
        with self._lock:
            for start, memory in where.items():
                if start <= address and address + size <= start + len(memory):
                    return memory[address - start :][:size]
        raise AssertionError(f"no allocation holds {size} bytes at {address}")

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        if self.used + size > self.total:
            return _Error.cudaErrorMemoryAllocation, None
        return _Error.cudaSuccess, self._allocate(size, self.device)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, self._allocate(size, self.pinned)

    def cudaFree(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        del self.device[address]
        return (_Error.cudaSuccess,)

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        del self.pinned[address]
        return (_Error.cudaSuccess,)

    def cudaMemGetInfo(self) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, self.total - self.used, self.total

    # --- Streams --------------------------------------------------------------------------------------------------

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        """Put work on a stream, or into the graph that is captured from it."""
        self._captures.get(stream, self._queues[stream]).append(work)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is captured from a stream."""
        return stream in self._captures

    def pending(self, stream: int) -> int:
        """How much there is on a stream that has not run."""
        return len(self._queues[stream])

    def _run(self, stream: int, until: Callable[[], bool] = lambda: False) -> None:
        queue = self._queues[stream]
        while queue and not until():
            queue.popleft()()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, next(self._numbers)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        if self.fail_waits:
            return (_Error.cudaErrorLaunchFailure,)
        self.waits += 1
        self._run(stream)
        return (_Error.cudaSuccess,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        device, host = (to, source) if kind == 1 else (source, to)
        self.bytes_at(device, size)
        self._find(self.pinned, host, size)  # A copy of other memory would wait for the stream.
        with self._lock:
            self.uploads += kind == 1
            self.downloads += kind == 2
        self.enqueue(stream, lambda: ctypes.memmove(to, source, size) and None)
        return (_Error.cudaSuccess,)

    def cudaMemcpy2DAsync(  # noqa: N802
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        assert kind == 3 and width <= min(to_pitch, source_pitch)
        for start, pitch in ((to, to_pitch), (source, source_pitch)):
            self.bytes_at(start, (height - 1) * pitch + width)

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)

        self.enqueue(stream, copy)
        return (_Error.cudaSuccess,)

    def cudaMemsetAsync(self, address: int, byte: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.enqueue(stream, lambda: self.bytes_at(address, size).fill(byte))
        return (_Error.cudaSuccess,)

    # --- Events ---------------------------------------------------------------------------------------------------

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, next(self._numbers)

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self._events[event] = stream
        self.enqueue(stream, lambda: self._events.pop(event, 0) and None)
        return (_Error.cudaSuccess,)

    def cudaEventQuery(self, event: int) -> tuple[Any, ...]:  # noqa: N802
        return (_Error.cudaErrorNotReady if event in self._events else _Error.cudaSuccess,)

    def cudaEventSynchronize(self, event: int) -> tuple[Any, ...]:  # noqa: N802
        if self.fail_waits:
            return (_Error.cudaErrorLaunchFailure,)
        if event in self._events:
            self.waits += 1
            self._run(self._events[event], until=lambda: event not in self._events)
        return (_Error.cudaSuccess,)

    # --- Graphs ---------------------------------------------------------------------------------------------------

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:  # noqa: N802
        assert stream not in self._captures
        self._captures[stream] = []
        return (_Error.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        graph = next(self._numbers)
        self._graphs[graph] = self._captures.pop(stream)
        return _Error.cudaSuccess, graph

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        executable = next(self._numbers)
        self._graphs[executable] = self._graphs[graph]
        return _Error.cudaSuccess, executable

    def cudaGraphLaunch(self, executable: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.replays += 1
        for work in self._graphs[executable]:
            self.enqueue(stream, work)
        return (_Error.cudaSuccess,)

    # --- The rest -------------------------------------------------------------------------------------------------

    def cudaDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, self.capability[attribute]

    def cudaGetErrorString(self, error: _Error) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, error.name.encode()

    def __getattr__(self, name: str) -> Any:
        values = {"cudaGetDeviceCount": 1, "cudaGetDevice": 0}
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: (_Error.cudaSuccess, values[name]) if name in values else (_Error.cudaSuccess,)

    def tensor(self, dtype: DType, shape: tuple[int, ...], address: int) -> torch.Tensor:
        """Device memory as a tensor."""
        size = TORCH_TYPES[dtype].itemsize * int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(self.bytes_at(address, size)).view(TORCH_TYPES[dtype]).reshape(shape)


def compute(
    file: GraphFile,
    values: dict[str, torch.Tensor],
    place: Callable[[str, torch.Tensor], torch.Tensor],
    cache: WeightCache,
) -> None:
    """Run a graph with the reference ops.

    Args:
        values: the inputs, to which the outputs of every node are added.
        place: puts a node's output where it belongs and returns it.
    """
    for node in file.nodes:
        op = OPS[node.op]
        named = {b.name: values[x] for b, x in zip(op.node_inputs(node.fields), node.inputs, strict=True)}
        results = REFERENCE_OPS[node.op](node.fields, named, cache)
        for binding, name in zip(op.node_outputs(node.fields), node.outputs, strict=True):
            values[name] = named[binding.alias] if binding.alias else place(name, results[binding.name])


class ReferenceHost:
    """Computes an executor's runs with the reference ops, on the fake device's memory."""

    def __init__(self, executor: PluginHostExecutor, cuda: FakeCuda) -> None:
        self._cuda, self._cache = cuda, WeightCache()
        for phase, graph in executor.graphs.items():
            file = executor.files[phase]

            def launch(
                run: Run, stream: int, use_graph: bool, graph: HostGraph = graph, file: GraphFile = file
            ) -> RunKind:
                cuda.enqueue(stream, lambda: self._compute(graph, file, run))
                return "eager"

            graph.launch = launch  # type: ignore[method-assign]

    def _compute(self, graph: HostGraph, file: GraphFile, run: Run) -> None:
        dims: Iterator[int] = iter(run.dims.tolist())
        graph.set_shapes({name: [next(dims) for _ in shape] for name, shape in graph.inputs.items()})
        addresses: Mapping[str, int] = dict(zip((*graph.inputs, *graph.outputs), run.addresses.tolist(), strict=True))

        def place(name: str, result: torch.Tensor) -> torch.Tensor:
            placement = graph.placement(name)
            at = run.arena + placement.offset if placement.storage == "arena" else addresses[name]
            return self._cuda.tensor(*graph.shape(name), at).copy_(result)

        inputs = {name: self._cuda.tensor(*graph.shape(name), addresses[name]) for name in graph.inputs}
        compute(file, inputs, place, self._cache)
