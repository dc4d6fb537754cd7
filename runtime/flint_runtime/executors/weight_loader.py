"""Weights from safetensors files to the GPU, through pinned buffers that several threads fill.

All tensors of an engine share one allocation, each aligned to 256 bytes. A chunk of a file is read straight into the
form that it has on the GPU (preadv leaves the gaps), so it is one copy however many tensors it holds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flint_runtime.errors import EngineError
from flint_runtime.executors import cuda
from flint_runtime.executors.weight_file import StoredTensor, read_headers

ALIGNMENT = 256
CHUNK_BYTES = 16 << 20
READERS = 8
_BUFFERS = 2
"""Per reader: one is filled while the other is copied."""
_MAX_PIECES = 512
"""Of one chunk; preadv takes at most 1024."""


@dataclass
class Chunk:
    """Neighbouring bytes of one file, and where each piece goes."""

    path: Path
    offset: int
    """In the file."""
    start: int
    """On the GPU, from the allocation's start."""
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """Distance from `start`, and bytes."""

    @property
    def extent(self) -> int:
        """Bytes on the GPU, gaps included."""
        last, size = self.pieces[-1]
        return last + size


@dataclass(frozen=True)
class WeightLayout:
    """Where every tensor lies in the allocation, and how to fill it."""

    tensors: dict[str, StoredTensor]
    offsets: dict[str, int]
    chunks: list[Chunk]
    size: int


def plan_weights(paths: Sequence[Path], chunk_bytes: int = CHUNK_BYTES) -> WeightLayout:
    """Lay out the tensors of several files. Raises EngineError where one is damaged or a name comes twice."""
    tensors = read_headers(paths)
    offsets: dict[str, int] = {}
    chunks: list[Chunk] = []
    chunk: Chunk | None = None
    end = 0
    for name, tensor in tensors.items():
        end = -(-end // ALIGNMENT) * ALIGNMENT
        offsets[name] = end
        done = 0
        while done < tensor.size:
            room = chunk_bytes - (end - chunk.start) if chunk else 0
            position = tensor.offset + done
            if chunk is None or room <= 0 or not _follows(chunk, tensor.path, position):
                chunk, room = Chunk(tensor.path, position, end), chunk_bytes
                chunks.append(chunk)
            size = min(room, tensor.size - done)
            chunk.pieces.append((end - chunk.start, size))
            done, end = done + size, end + size
    return WeightLayout(tensors, offsets, chunks, end)


def _follows(chunk: Chunk, path: Path, position: int) -> bool:
    """Whether a piece at this place of a file may be the next of a chunk."""
    end = chunk.offset + sum(size for _, size in chunk.pieces)
    return (path, position) == (chunk.path, end) and len(chunk.pieces) < _MAX_PIECES


def upload_weights(layout: WeightLayout, address: int, progress: Callable[[int], None] | None = None) -> None:
    """Read every chunk and copy it to the GPU; returns when all is there.

    Args:
        address: of `layout.size` bytes of device memory.
        progress: called with the number of bytes read since the last call, from several threads.
    Raises:
        EngineError: a file cannot be read or is cut off.
        CudaError: a copy failed.
    """
    work, lock = iter(layout.chunks), threading.Lock()
    failures: list[BaseException] = []
    device = cuda.current_device()

    def take() -> Iterator[Chunk]:
        while not failures:
            with lock:
                chunk = next(work, None)
            if chunk is None:
                return
            yield chunk

    def read() -> None:
        try:
            cuda.use_device(device)
            _Reader(address, progress).run(take())
        except BaseException as error:  # For the thread that waits.
            failures.append(error)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(min(READERS, len(layout.chunks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class _Reader:
    """One thread's stream, buffers and open file."""

    def __init__(self, address: int, progress: Callable[[int], None] | None) -> None:
        self._address, self._progress = address, progress
        self._stream = cuda.Stream()
        self._buffers = [(cuda.PinnedMemory(CHUNK_BYTES), cuda.Event()) for _ in range(_BUFFERS)]

    def run(self, chunks: Iterator[Chunk]) -> None:
        """Read and copy chunks until there are no more."""
        path: Path | None = None
        descriptor = -1
        try:
            for index, chunk in enumerate(chunks):
                if chunk.path != path:
                    if descriptor >= 0:
                        os.close(descriptor)
                    descriptor, path = -1, chunk.path
                    descriptor = os.open(path, os.O_RDONLY)
                buffer, copied = self._buffers[index % _BUFFERS]
                copied.wait()
                count = read_chunk(descriptor, chunk, buffer.array.data)
                self._stream.upload(self._address + chunk.start, buffer.address, chunk.extent)
                copied.record(self._stream)
                if self._progress:
                    self._progress(count)
        except OSError as error:
            raise EngineError(f"{path} cannot be read: {error}. Copy the engine again or rebuild it.") from None
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            self._stream.wait()


def read_chunk(descriptor: int, chunk: Chunk, buffer: memoryview) -> int:
    """Read a chunk's pieces to their places in `buffer`; return the bytes read. Raises EngineError at a short file."""
    views = [buffer[start : start + size] for start, size in chunk.pieces]
    position = chunk.offset
    while views:
        count = os.preadv(descriptor, views, position)
        if not count:
            raise EngineError(f"{chunk.path} is cut off at byte {position}. Copy the engine again or rebuild it.")
        position += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return position - chunk.offset
