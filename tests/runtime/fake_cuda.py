"""A CUDA runtime whose device memory is host memory, and a plugin host that computes with the reference ops.

With both, everything of the plugin-host executor but the plugins' kernels runs without a GPU: the upload of weights,
where things lie, what is copied, which addresses and shapes the graph is given.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flint_plugins.ops import OPS, DType
from flint_runtime.executors.host_library import HostGraph, Run, RunKind
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference_ops import REFERENCE_OPS
from flint_runtime.executors.reference_weights import WeightCache

_TORCH: dict[DType, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i8": torch.int8}


class _Error(Enum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815


class FakeCuda:
    """Stands for the module cuda.bindings.runtime. Copies are checked against the allocations."""

    cudaError_t = _Error  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815
    cudaEventDisableTiming = 2  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrComputeCapabilityMajor="major", cudaDevAttrComputeCapabilityMinor="minor"
    )

    def __init__(self, total: int = 1 << 30, capability: tuple[int, int] = (9, 0)) -> None:
        self.total, self.capability = total, dict(zip(("major", "minor"), capability, strict=True))
        self.device: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.uploads = self.downloads = 0
        self._lock = threading.Lock()

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
        for start, memory in self.device.items():
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

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.bytes_at(to if kind == 1 else source, size)
        with self._lock:
            self.uploads += kind == 1
            self.downloads += kind == 2
        ctypes.memmove(to, source, size)
        return (_Error.cudaSuccess,)

    def cudaMemsetAsync(self, address: int, byte: int, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.bytes_at(address, size)[:] = byte
        return (_Error.cudaSuccess,)

    def cudaDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, self.capability[attribute]

    def cudaGetErrorString(self, error: _Error) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, error.name.encode()

    def __getattr__(self, name: str) -> Any:
        values = {
            "cudaGetDeviceCount": 1, "cudaGetDevice": 0, "cudaStreamCreateWithFlags": 7, "cudaEventCreateWithFlags": 8,
        }  # fmt: skip
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: (_Error.cudaSuccess, values[name]) if name in values else (_Error.cudaSuccess,)


class ReferenceHost:
    """Computes an executor's runs with the reference ops, on the fake device's memory."""

    def __init__(self, executor: PluginHostExecutor, cuda: FakeCuda) -> None:
        self._executor, self._cuda, self._cache = executor, cuda, WeightCache()
        for loaded in executor._graphs.values():
            graph = loaded.graph
            graph.launch = lambda run, stream, use_graph, graph=graph: self._launch(graph, run)  # type: ignore[method-assign]

    def _launch(self, graph: HostGraph, run: Run) -> RunKind:
        file = next(loaded.file for loaded in self._executor._graphs.values() if loaded.graph is graph)
        dims: Iterator[int] = iter(run.dims.tolist())
        graph.set_shapes({name: [next(dims) for _ in shape] for name, shape in graph.inputs.items()})
        addresses = dict(zip((*graph.inputs, *graph.outputs), run.addresses.tolist(), strict=True))
        values: dict[str, torch.Tensor] = {name: self._tensor(graph, name, addresses[name]) for name in graph.inputs}
        for node in file.nodes:
            op = OPS[node.op]
            named = {b.name: values[x] for b, x in zip(op.node_inputs(node.fields), node.inputs, strict=True)}
            results = REFERENCE_OPS[node.op](node.fields, named, self._cache)
            for binding, name in zip(op.node_outputs(node.fields), node.outputs, strict=True):
                if binding.alias:
                    values[name] = named[binding.alias]
                    continue
                placement = graph.placement(name)
                at = run.arena + placement.offset if placement.storage == "arena" else addresses[name]
                values[name] = self._tensor(graph, name, at)
                values[name].copy_(results[binding.name])
        return "eager"

    def _tensor(self, graph: HostGraph, name: str, address: int) -> torch.Tensor:
        dtype, shape = graph.shape(name)
        size = _TORCH[dtype].itemsize * int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(self._cuda.bytes_at(address, size)).view(_TORCH[dtype]).reshape(shape)
