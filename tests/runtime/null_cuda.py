"""A CUDA runtime that does nothing at once: for what the host does by itself. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np


class _Error(Enum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorNotReady = 600  # noqa: N815


class NullCuda:
    """Stands for the module cuda.bindings.runtime: pinned memory is there, device memory is not."""

    cudaError_t = _Error  # noqa: N815
    cudaStreamNonBlocking = cudaEventDisableTiming = 1  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrComputeCapabilityMajor="major", cudaDevAttrComputeCapabilityMinor="minor"
    )

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = dict(zip(("major", "minor"), capability, strict=True))
        self._pinned: list[np.ndarray] = []

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self._pinned.append(np.zeros(size, np.uint8))
        return _Error.cudaSuccess, self._pinned[-1].ctypes.data

    def cudaDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:  # noqa: N802
        return _Error.cudaSuccess, self._capability[attribute]

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        values: dict[str, tuple[Any, ...]] = {
            "cudaGetDeviceCount": (1,),
            "cudaGetDevice": (0,),
            "cudaMemGetInfo": (1 << 40, 1 << 40),
            "cudaMalloc": (1 << 40,),
            "cudaStreamCreateWithFlags": (7,),
            "cudaEventCreateWithFlags": (8,),
        }
        if not name.startswith("cuda"):
            raise AttributeError(name)
        answer = (_Error.cudaSuccess, *values.get(name, ()))

        def call(*_: object) -> tuple[Any, ...]:
            return answer

        setattr(self, name, call)  # Found without __getattr__ from now on.
        return call
