"""Writing a safetensors file as a stream, hashed on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt
from blake3 import blake3

from flint_builder.weights import EngineTensor
from flint_plugins.ops import DType

_DTYPE_NAMES: dict[DType, str] = {"bf16": "BF16", "f32": "F32", "i32": "I32", "i8": "I8"}
_HEADER_ALIGNMENT = 8


class SafetensorsWriter:
    """One new safetensors file; a context manager. The tensors' data are written in order, in pieces of any size.

    Attributes:
        size: bytes of the file.
        blake3: hexadecimal hash of the file, complete when the context was left.
    Raises:
        OSError: the file exists or cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[EngineTensor]) -> None:
        self._path = path
        self._header = header(tensors)
        self.size = len(self._header) + sum(tensor.bytes for tensor in tensors)
        self._written = 0
        self._hash = blake3()

    def __enter__(self) -> SafetensorsWriter:
        self._file = self._path.open("xb", buffering=0)
        self._put(memoryview(self._header))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                assert self._written == self.size, (self._path, self._written, self.size)
                os.fsync(self._file.fileno())

    @property
    def blake3(self) -> str:
        """Hash of what was written so far, hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: npt.NDArray[Any]) -> None:
        """Append the bytes of a C-contiguous array."""
        self._put(data.data.cast("B"))

    def _put(self, data: memoryview) -> None:
        self._hash.update(data)
        self._written += data.nbytes
        while data:
            data = data[self._file.write(data) :]


def header(tensors: Sequence[EngineTensor]) -> bytes:
    """Length and JSON header of a safetensors file with these tensors in this order, padded to 8 bytes."""
    entries, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.bytes
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
