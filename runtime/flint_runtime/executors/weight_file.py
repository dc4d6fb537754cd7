"""What an engine's weight files hold: the headers of safetensors files, read and checked without their data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flint_plugins.ops import DType
from flint_runtime.engine import CURE
from flint_runtime.errors import EngineError

_DTYPES: dict[str, tuple[DType, int]] = {"BF16": ("bf16", 2), "F32": ("f32", 4), "I32": ("i32", 4), "I8": ("i8", 1)}
_MAX_HEADER_BYTES = 16 << 20
_MAX_RANK = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: type, shape, first byte in the file, bytes."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    size: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, in the order of their bytes. Raises EngineError where it is damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header is said to have {length} bytes")
            header = file.read(length)
            if len(header) < length:
                raise ValueError("its header is cut off")
            entries = json.loads(header)
            end = file.seek(0, 2)
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        found = {
            name: _tensor(path, name, entry, 8 + length, end) for name, entry in entries.items() if name != _METADATA
        }
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} cannot be read: {error!s:.500}. {CURE}") from None
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def _tensor(path: Path, name: str, entry: Any, start: int, end: int) -> StoredTensor:
    """A header's entry, for data that lie from `start` to `end`. Raises ValueError."""
    try:
        dtype, width = _DTYPES[entry["dtype"]]
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        numbers = (*shape, first, last)
        if len(shape) > _MAX_RANK or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name!r:.200} is described as {entry!r:.200}") from None
    if start + last > end:
        raise ValueError(f"tensor {name!r:.200} ends behind the file")
    if last - first != math.prod(shape) * width:
        raise ValueError(f"tensor {name!r:.200} of shape {shape!r:.200} has {last - first} bytes")
    return StoredTensor(path, dtype, tuple(shape), start + first, last - first)


def read_headers(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of several files, file by file. Raises EngineError where one is damaged or a name comes twice."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in found:
                raise EngineError(f"{path}: tensor {name!r:.200} is in another weight file, too. {CURE}")
            found[name] = tensor
    return found
