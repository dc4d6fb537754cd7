"""The few CUDA calls that the GPU executors need, through cuda-bindings: memory, one stream, copies, device facts.

Importing this module needs no GPU and no cuda-bindings; calling it does. Addresses and streams are integers. A stream
here is not ordered with the default stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flint_runtime.errors import FlintError, UnsupportedError

Bytes = npt.NDArray[np.uint8]


class CudaError(FlintError):
    """A CUDA call failed."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


def _runtime() -> Any:
    """The module cuda.bindings.runtime, whose functions return a tuple that starts with an error."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UnsupportedError(
            f"The GPU executors need cuda-bindings, which does not load here ({error}). Install it with: "
            "pip install 'flint-tensorrt[cuda]'"
        ) from None
    return runtime


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime and return what it returns: nothing, one value or a tuple.

    Raises:
        CudaError: naming the function and the error.
        UnsupportedError: cuda-bindings is not installed.
    """
    runtime = _runtime()
    function: Callable[..., tuple[Any, ...]] = getattr(runtime, name)
    error, *results = function(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # Reported here, so the next call need not find it.
        text = runtime.cudaGetErrorString(error)[1]
        text = text.decode() if isinstance(text, bytes) else text
        raise CudaError(
            f"{name} failed: {error.name}, {text}.",
            out_of_memory=error == runtime.cudaError_t.cudaErrorMemoryAllocation,
        )
    return results[0] if len(results) == 1 else tuple(results) if results else None


def device_problem() -> str | None:
    """Why there is no CUDA device to use, or None."""
    try:
        return None if call("cudaGetDeviceCount") else "there is no CUDA device"
    except FlintError as error:
        return str(error)


def current_device() -> int:
    """Index of the device that this thread uses."""
    device: int = call("cudaGetDevice")
    return device


def use_device(device: int) -> None:
    """Make this thread use a device."""
    call("cudaSetDevice", device)


def device_architecture() -> str:
    """Such as "sm90"."""
    attributes = _runtime().cudaDeviceAttr
    major, minor = (
        call("cudaDeviceGetAttribute", attribute, current_device())
        for attribute in (attributes.cudaDevAttrComputeCapabilityMajor, attributes.cudaDevAttrComputeCapabilityMinor)
    )
    return f"sm{major}{minor}"


def memory_info() -> tuple[int, int]:
    """Free and total bytes of the device."""
    free, total = call("cudaMemGetInfo")
    return free, total


class DeviceMemory:
    """An allocation on the device, aligned to 256 bytes; freed with the object."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes. Raises CudaError."""
        self.address, self.size = 0, size
        self.address = call("cudaMalloc", size) if size else 0

    def free(self) -> None:
        """Free it now; nothing may use it any more."""
        if self.address:
            call("cudaFree", self.address)
            self.address = 0

    def __del__(self) -> None:
        _quietly(self.free)


class PinnedMemory:
    """Host memory that the device copies from and to at full speed; `array` are its bytes."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes. Raises CudaError."""
        self.address = 0
        self.address = call("cudaHostAlloc", max(size, 1), 0)
        # The array does not own the memory: keep this object as long as views of it.
        buffer = (ctypes.c_uint8 * max(size, 1)).from_address(self.address)
        self.array: Bytes = np.ctypeslib.as_array(buffer)

    def free(self) -> None:
        """Free it now; no copy and no view may use it any more."""
        if self.address:
            call("cudaFreeHost", self.address)
            self.address = 0

    def __del__(self) -> None:
        _quietly(self.free)


class Stream:
    """A stream; `handle` is its cudaStream_t."""

    def __init__(self) -> None:
        self.handle = 0
        self._object = call("cudaStreamCreateWithFlags", _runtime().cudaStreamNonBlocking)
        self.handle = int(self._object)

    def upload(self, address: int, host: int, size: int) -> None:
        """Copy `size` bytes from host to device; at once if the host memory is pinned."""
        call("cudaMemcpyAsync", address, host, size, _runtime().cudaMemcpyKind.cudaMemcpyHostToDevice, self.handle)

    def download(self, host: int, address: int, size: int) -> None:
        """Copy `size` bytes from device to host; they are there after `wait`."""
        call("cudaMemcpyAsync", host, address, size, _runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost, self.handle)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set device bytes."""
        if size:
            call("cudaMemsetAsync", address, byte, size, self.handle)

    def wait(self) -> None:
        """Wait for everything on the stream. Raises CudaError for what failed there."""
        call("cudaStreamSynchronize", self.handle)

    def free(self) -> None:
        """Destroy the stream."""
        if self.handle:
            call("cudaStreamDestroy", self.handle)
            self.handle = 0

    def __del__(self) -> None:
        _quietly(self.free)


class Event:
    """A point on a stream that can be waited for."""

    def __init__(self) -> None:
        self._object = None
        self._object = call("cudaEventCreateWithFlags", _runtime().cudaEventDisableTiming)

    def record(self, stream: Stream) -> None:
        """Move the point to the stream's present end."""
        call("cudaEventRecord", self._object, stream.handle)

    def wait(self) -> None:
        """Wait on the host; at once where it was never recorded."""
        call("cudaEventSynchronize", self._object)

    def __del__(self) -> None:
        if self._object is not None:
            _quietly(lambda: call("cudaEventDestroy", self._object))


def _quietly(free: Callable[[], None]) -> None:
    """Free something while an object dies: the process may be past its CUDA context."""
    try:
        free()
    except Exception:
        return
