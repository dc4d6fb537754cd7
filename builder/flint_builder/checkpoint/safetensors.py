"""safetensors files: the header of one, and the index that ties several together.

Layout: header length u64 (little endian), a JSON object of name to {dtype, shape, data_offsets [begin, end]}, then the
data, to which the offsets are relative; the tensors fill the data without gaps.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.tensors import StoredTensor
from flint_runtime.errors import CheckpointError, shown
from flint_runtime.small_files import LFS_HEAD_BYTES, LFS_PROBLEM, is_lfs_pointer, json_object

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

# Far above any real file: one with every expert of the released model by itself has 38,000 tensors and 6 MB.
_MAX_JSON_BYTES = 16 << 20
_MAX_JSON_ITEMS = 1 << 20
_MAX_DIMENSIONS = 8


def read_tensors(file: DataFile) -> dict[str, StoredTensor]:
    """Parse the header of one safetensors file.

    Raises:
        CheckpointError: cut off or damaged; memory stays bounded whatever the file holds.
    """
    if file.size < 8:
        _fail(file, f"it has only {file.size} bytes")
    if is_lfs_pointer(file.read(0, LFS_HEAD_BYTES)):
        raise CheckpointError(f"{file} is no safetensors file: {LFS_PROBLEM}.")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        _fail(file, f"its header needs {length} bytes, but the file ends at byte {file.size}")
    header = _object(file, file.read(8, _bounded(file, length)), "header")
    start = 8 + length
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items()}
    _check_extent(file, list(tensors.values()), start)
    return tensors


def read_index(index: Path) -> dict[str, StoredTensor]:
    """Read all shards that an index (`model.safetensors.index.json`) names.

    Raises:
        CheckpointError: the index and its shards contradict each other, or one of them is damaged.
    """
    file = DataFile(index)
    content = _object(file, file.read(0, _bounded(file, file.size)), "index")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        _fail(file, "it has no weight_map from tensor names to file names")
    shards = {name: _shard(file, name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            other = next((s for s, tensors in shards.items() if name in tensors), None)
            where = f"it is in {other}" if other else "no shard has it"
            raise CheckpointError(
                f"{index} says that tensor {name} is in {shard}, but {where}. The shard belongs to another "
                "checkpoint or revision; download index and shards again, together."
            )
    tensors: dict[str, StoredTensor] = {}
    for shard, found in shards.items():
        stray = sorted(name for name in found if weight_map.get(name) != shard)
        if stray:
            raise CheckpointError(
                f"{index.parent / shard} holds tensor {stray[0]}, which {index.name} "
                f"{'places in ' + weight_map[stray[0]] if stray[0] in weight_map else 'does not name'}. The shard "
                "belongs to another checkpoint or revision; download index and shards again, together."
            )
        tensors |= found
    _check_total(file, content, sum(tensor.bytes for tensor in tensors.values()))
    return tensors


def _fail(file: DataFile, problem: str) -> NoReturn:
    raise CheckpointError(f"{file} is damaged or incomplete: {problem}. Download it again.")


def _bounded(file: DataFile, length: int) -> int:
    if length > _MAX_JSON_BYTES:
        _fail(file, f"its JSON has {length} bytes; at most {_MAX_JSON_BYTES} are accepted")
    return length


def _object(file: DataFile, text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object of bounded size without repeated keys."""
    if sum(text.count(mark) for mark in (b"{", b"[", b",")) > _MAX_JSON_ITEMS:
        _fail(file, f"its {what} has more than {_MAX_JSON_ITEMS} JSON items")

    if is_lfs_pointer(text):
        raise CheckpointError(f"{file} is no {what}: {LFS_PROBLEM}.")
    try:
        return json_object(text)
    except ValueError as error:
        _fail(file, f"its {what} cannot be used: {error}")


def _tensor(file: DataFile, name: str, entry: Any, start: int) -> StoredTensor:
    """Check one entry of a header; `start` is the first byte of the data."""
    if not isinstance(entry, dict):
        _fail(file, f"the entry of tensor {name} is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _fail(file, f"tensor {name} has the unknown type {shown(dtype)}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not 0 < prod(shape) < 1 << 63:
        _fail(file, f"tensor {name} has the shape {shown(shape)}, which no tensor can have")
    if not _is_sizes(offsets) or len(offsets) != 2:
        _fail(file, f"tensor {name} has the data_offsets {shown(offsets)}, expected two byte offsets")
    begin, end = offsets
    size = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != size:
        _fail(file, f"tensor {name} ({dtype} {shape}) needs {size} bytes, its data_offsets span {end - begin}")
    if start + end > file.size:
        _fail(
            file,
            f"tensor {name} ({dtype} {shape}) needs bytes {start + begin} to {start + end}, but the file ends at byte "
            f"{file.size}",
        )
    return StoredTensor(name, dtype, tuple(shape), file, start + begin, size)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extent(file: DataFile, tensors: list[StoredTensor], start: int) -> None:
    """The tensors must fill the data, in some order, with neither overlaps nor gaps."""
    tensors.sort(key=lambda tensor: tensor.offset)
    for tensor in tensors:
        if tensor.offset != start:
            problem = "overlaps the one before it" if tensor.offset < start else "leaves a gap before it"
            _fail(file, f"tensor {tensor.name} begins at byte {tensor.offset}, expected {start}: it {problem}")
        start += tensor.bytes
    if start != file.size:
        _fail(file, f"its tensors end at byte {start}, but the file ends at byte {file.size}")


def _shard(index: DataFile, name: str) -> dict[str, StoredTensor]:
    if name in ("", "..") or Path(name).name != name:
        _fail(index, f"it names the shard {name!r}, which is not a file name")
    path = index.path.parent / name
    if not path.exists():
        raise CheckpointError(
            f"{index} names the shard {name}, which is not in {index.path.parent}. The download is incomplete; "
            "download the checkpoint again."
        )
    return read_tensors(DataFile(path))


def _check_total(index: DataFile, content: dict[str, Any], found: int) -> None:
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and total != found:
        raise CheckpointError(
            f"{index}: metadata.total_size is {total!r} bytes, but its shards hold {found} bytes of tensors. A shard "
            "belongs to another checkpoint or revision; download index and shards again, together."
        )
