"""GGUF version 3: the header, read as a stream and checked against the file's size before anything is allocated.

Layout (little endian): magic, version u32, tensor count u64, metadata count u64; metadata entries (key, type u32,
value); tensor entries (name, dimensions u32, each dimension u64 with the fastest first, type u32, offset u64); then,
at the next multiple of `general.alignment`, the tensors' data, to which the offsets are relative.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NoReturn

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGUF_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
)

from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.tensors import StoredTensor
from flint_runtime.errors import CheckpointError
from flint_runtime.small_files import LFS_HEAD_BYTES, LFS_PROBLEM, is_lfs_pointer

# Far above any real file: the released one has about 50 metadata entries, 1,600 tensors and 150,000 tokens.
_MAX_METADATA = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 12
_MAX_STRINGS = 1 << 20
"""Strings in all arrays together (tokens and merges): each must be walked over."""
_MAX_KEPT_ITEMS = 1 << 16
_MAX_KEPT_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 18

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class Skipped:
    """A metadata value that was stepped over: the tokenizer's, or a very long one."""

    count: int
    """Items of an array, bytes of a string."""


Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | Skipped


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file. NVFP4 tensors have the type "NVFP4" and their shape in values."""

    file: DataFile
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]


def read_header(file: DataFile) -> GgufHeader:
    """Parse the header of a GGUF file.

    Raises:
        CheckpointError: not GGUF version 3, cut off, or damaged; memory and time stay bounded whatever the file holds.
    """
    return _Parser(file).parse()


class _Parser:
    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._position = 0
        self._buffer = b""
        self._buffer_start = 0
        self._kept_bytes = 0
        self._strings = 0

    def parse(self) -> GgufHeader:
        self._magic()
        tensor_count = self._count("tensors", _MAX_TENSORS)
        metadata_count = self._count("metadata entries", _MAX_METADATA)
        metadata: dict[str, Value] = {}
        for index in range(metadata_count):
            key = self._name(f"the key of metadata entry {index}")
            if key in metadata:
                self._fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(key)
        infos = [self._tensor_info(index) for index in range(tensor_count)]
        start = self._data_start(metadata)
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                self._fail(f"tensor {name} occurs twice")
            tensors[name] = self._place(name, shape, kind, start, offset)
        self._refuse_overlap(list(tensors.values()))
        return GgufHeader(self._file, metadata, tensors)

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self._file} is not a valid GGUF file: {problem}. It is damaged or incomplete; download it again."
        )

    def _take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        self._require(count, what)
        start = self._position - self._buffer_start
        if start + count > len(self._buffer):
            self._buffer_start, start = self._position, 0
            self._buffer = self._file.read(self._position, max(count, _BUFFER_BYTES))
            if len(self._buffer) < count:
                self._fail(f"it became shorter while {what} was read")
        self._position += count
        return self._buffer[start : start + count]

    def _require(self, count: int, what: str) -> None:
        if self._position + count > self._file.size:
            self._fail(
                f"{what} at byte {self._position} needs {count} bytes, but the file ends at byte {self._file.size}"
            )

    def _keep(self, count: int, what: str) -> None:
        """Account for bytes that stay in memory."""
        self._kept_bytes += count
        if self._kept_bytes > _MAX_KEPT_BYTES:
            self._fail(f"its header is larger than {_MAX_KEPT_BYTES} bytes without the tokenizer, at {what}")

    def _u32(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little")

    def _u64(self, what: str) -> int:
        return int.from_bytes(self._take(8, what), "little")

    def _magic(self) -> None:
        if self._file.size < 8:
            self._fail(f"it has only {self._file.size} bytes")
        if is_lfs_pointer(self._file.read(0, LFS_HEAD_BYTES)):
            raise CheckpointError(f"{self._file} is no GGUF file: {LFS_PROBLEM}.")
        magic, version = struct.unpack("<II", self._take(8, "magic and version"))
        if magic != GGUF_MAGIC:
            self._fail(f"it begins with bytes {struct.pack('<I', magic).hex(' ')}, expected 'GGUF'")
        if version != GGUF_VERSION:
            swapped = version == int.from_bytes(GGUF_VERSION.to_bytes(4, "big"), "little")
            found = "big-endian" if swapped else f"version {version}"
            raise CheckpointError(
                f"{self._file} is a {found} GGUF file; expected little-endian version {GGUF_VERSION}. Convert it again "
                "with a current converter."
            )

    def _count(self, what: str, most: int) -> int:
        count = self._u64(f"the number of {what}")
        if count > most:
            self._fail(f"it claims {count} {what}; at most {most} are accepted")
        return count

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if not 0 < length <= _MAX_NAME_BYTES:
            self._fail(f"{what} has a length of {length} bytes; 1 to {_MAX_NAME_BYTES} are accepted")
        self._keep(length, what)
        return self._text(self._take(length, what), what)

    def _string(self, what: str, keep: bool) -> str | Skipped:
        length = self._u64(what)
        self._require(length, what)
        if not keep or length > _MAX_KEPT_ITEMS:
            self._position += length
            return Skipped(length)
        self._keep(length, what)
        return self._text(self._take(length, what), what)

    def _type(self, what: str) -> GGUFValueType:
        code = self._u32(f"the type of {what}")
        try:
            return GGUFValueType(code)
        except ValueError:
            self._fail(f"{what} has the unknown type {code}")

    def _value(self, key: str) -> Value:
        what = f"metadata {key!r}"
        keep = not key.startswith("tokenizer.")
        kind = self._type(what)
        if kind is GGUFValueType.STRING:
            return self._string(what, keep)
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(kind, what)
        item = self._type(f"the items of {what}")
        count = self._u64(f"the length of {what}")
        if item is GGUFValueType.ARRAY:
            self._fail(f"{what} is an array of arrays, which is not supported")
        keep = keep and count <= _MAX_KEPT_ITEMS
        if item is GGUFValueType.STRING:
            return self._string_array(what, count, keep)
        width = struct.calcsize(_SCALARS[item])
        self._require(count * width, what)
        if not keep:
            self._position += count * width
            return Skipped(count)
        self._keep(count * width, what)
        code = _SCALARS[item]
        return struct.unpack(f"<{count}{code[1]}", self._take(count * width, what))

    def _scalar(self, kind: GGUFValueType, what: str) -> Scalar:
        code = _SCALARS[kind]
        value: Scalar = struct.unpack(code, self._take(struct.calcsize(code), what))[0]
        return value

    def _string_array(self, what: str, count: int, keep: bool) -> Value:
        self._require(8 * count, what)
        self._strings += count
        if self._strings > _MAX_STRINGS:
            self._fail(f"its arrays hold more than {_MAX_STRINGS} strings, at {what}")
        if not keep:
            return self._skip_strings(count, what)
        items = [self._string(f"item {index} of {what}", True) for index in range(count)]
        return tuple(f"<{item.count} bytes>" if isinstance(item, Skipped) else item for item in items)

    def _skip_strings(self, count: int, what: str) -> Skipped:
        """Step over an array of strings; a loop of its own, because a vocabulary has hundreds of thousands."""
        position, size = self._position, self._file.size
        buffer, start = self._buffer, self._buffer_start
        for _ in range(count):
            at = position - start
            if at + 8 > len(buffer):
                if position + 8 > size:
                    break
                buffer, start, at = self._file.read(position, _BUFFER_BYTES), position, 0
            position += 8 + int.from_bytes(buffer[at : at + 8], "little")
        if position > size or self._position + 8 * count > position:
            self._fail(f"the strings of {what} need bytes up to {position}, but the file ends at byte {size}")
        self._position, self._buffer, self._buffer_start = position, buffer, start
        return Skipped(count)

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """One tensor entry: (name, shape with the fastest dimension last, type, offset)."""
        name = self._name(f"the name of tensor {index}")
        what = f"the entry of tensor {name}"
        dimensions = self._u32(what)
        if dimensions > _MAX_DIMENSIONS:
            self._fail(f"tensor {name} has {dimensions} dimensions; at most {_MAX_DIMENSIONS} are accepted")
        shape = tuple(self._u64(what) for _ in range(dimensions))[::-1]
        code, offset = self._u32(what), self._u64(what)
        try:
            return name, shape, GGMLQuantizationType(code), offset
        except ValueError:
            self._fail(f"tensor {name} has the unknown type {code}")

    def _data_start(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, expected a power of two")
        self._alignment = alignment
        return -(-self._position // alignment) * alignment

    def _place(
        self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int, offset: int
    ) -> StoredTensor:
        """Check a tensor's extent. Python's integers do not overflow."""
        values = prod(shape)
        if not 0 < values < 1 << 63:
            self._fail(f"tensor {name} has the shape {list(shape)}, which no tensor can have")
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        columns = shape[-1] if shape else 1
        if columns % block_values:
            self._fail(f"tensor {name} {list(shape)} has rows of {columns} values, not a multiple of {block_values}")
        if offset % self._alignment:
            self._fail(f"tensor {name} begins at offset {offset}, not a multiple of the alignment {self._alignment}")
        size = values // block_values * block_bytes
        if start + offset + size > self._file.size:
            self._fail(
                f"tensor {name} ({kind.name} {list(shape)}) needs bytes {start + offset} to {start + offset + size}, "
                f"but the file ends at byte {self._file.size}"
            )
        return StoredTensor(name, kind.name, shape, self._file, start + offset, size)

    def _refuse_overlap(self, tensors: list[StoredTensor]) -> None:
        tensors.sort(key=lambda tensor: tensor.offset)
        for left, right in pairwise(tensors):
            if left.offset + left.bytes > right.offset:
                self._fail(
                    f"tensors {left.name} and {right.name} overlap: the first ends at byte {left.offset + left.bytes}, "
                    f"the second begins at byte {right.offset}"
                )
