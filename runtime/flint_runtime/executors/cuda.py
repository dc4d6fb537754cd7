"""The few CUDA calls that the GPU executors need, through cuda-bindings: memory, streams, copies, device facts.

Importing this module needs no GPU and no cuda-bindings; calling it does. Addresses and streams are integers. A stream
here is not ordered with the default stream.
"""

from __future__ import annotations

import ctypes
import functools
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


@functools.cache
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
        runtime = _runtime()
        self._object = call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.handle = int(self._object)
        kinds = runtime.cudaMemcpyKind
        self._to_device, self._to_host = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self._on_device = kinds.cudaMemcpyDeviceToDevice

    def upload(self, address: int, host: int, size: int) -> None:
        """Copy `size` bytes from pinned host memory, which must stay as it is until they are there, to the device."""
        call("cudaMemcpyAsync", address, host, size, self._to_device, self.handle)

    def download(self, host: int, address: int, size: int) -> None:
        """Copy `size` bytes from the device to pinned host memory; they are there after `wait`."""
        call("cudaMemcpyAsync", host, address, size, self._to_host, self.handle)

    def copy_rows(self, to: int, source: int, width: int, rows: int, pitch: int) -> None:
        """Copy `rows` pieces of `width` bytes, which stand every `pitch` bytes, within the device."""
        call("cudaMemcpy2DAsync", to, pitch, source, pitch, width, rows, self._on_device, self.handle)

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
        """Wait on the host; at once where it was never recorded. Raises CudaError for what failed before it."""
        call("cudaEventSynchronize", self._object)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        runtime = _runtime()
        return bool(runtime.cudaEventQuery(self._object)[0] != runtime.cudaError_t.cudaErrorNotReady)

    def __del__(self) -> None:
        if self._object is not None:
            _quietly(lambda: call("cudaEventDestroy", self._object))


class Graph:
    """What was put on a stream once, to be launched again as one."""

    def __init__(self, stream: Stream, enqueue: Callable[[], object]) -> None:
        """Capture what `enqueue` puts on the stream, without running it. Raises CudaError, and what `enqueue` does."""
        self._executable = None
        # Relaxed: a kernel may be loaded meanwhile, and nobody else uses the stream.
        call("cudaStreamBeginCapture", stream.handle, _runtime().cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        try:
            enqueue()
        except BaseException:
            graph = _runtime().cudaStreamEndCapture(stream.handle)[1]
            if graph:
                call("cudaGraphDestroy", graph)
            raise
        graph = call("cudaStreamEndCapture", stream.handle)
        try:
            self._executable = call("cudaGraphInstantiate", graph, 0)
        finally:
            call("cudaGraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        """Put it on a stream."""
        call("cudaGraphLaunch", self._executable, stream.handle)

    def __del__(self) -> None:
        if self._executable is not None:
            _quietly(lambda: call("cudaGraphExecDestroy", self._executable))


class UploadRing:
    """Pinned memory that small uploads pass through, so that the caller may forget its array at once.

    The memory is a circle of segments. Its writer waits only where it comes round to a segment from which copies are
    still under way.
    """

    def __init__(self, stream: Stream, segment_bytes: int, segments: int) -> None:
        """No upload may be larger than a segment. Raises CudaError."""
        self._stream, self._size = stream, segment_bytes
        self._memory = PinnedMemory(segment_bytes * segments)
        self._copied = [Event() for _ in range(segments)]
        self._segment = self._used = 0

    def upload(self, address: int, data: npt.NDArray[Any]) -> None:
        """Copy a contiguous array to the device, in the stream's order."""
        end = self._used + data.nbytes
        if end > self._size:
            self._copied[self._segment].record(self._stream)
            self._segment = (self._segment + 1) % len(self._copied)
            self._copied[self._segment].wait()
            self._used, end = 0, data.nbytes
        assert end <= self._size
        at = self._segment * self._size + self._used
        self._memory.array[at : at + data.nbytes] = data.reshape(-1).view(np.uint8)
        self._stream.upload(address, self._memory.address + at, data.nbytes)
        self._used = end

    def free(self) -> None:
        """Free the memory; no copy may be under way."""
        self._memory.free()


def _quietly(free: Callable[[], None]) -> None:
    """Free something while an object dies: the process may be past its CUDA context."""
    try:
        free()
    except Exception:
        return
