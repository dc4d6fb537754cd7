"""Headers of weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flint_runtime.errors import EngineError
from flint_runtime.executors.weight_file import StoredTensor, read_header, read_headers

GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}


def write(path: Path, header: bytes, data: bytes = bytes(64), length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    first = {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}
    empty = {"dtype": "BF16", "shape": [0, 7], "data_offsets": [64, 64]}
    header = json.dumps({"b": GOOD, "__metadata__": {"format": "pt"}, "c": empty, "a": first}).encode()
    path = write(tmp_path / "w", header)
    start = 8 + len(header)
    assert read_header(path) == {
        "a": StoredTensor(path, "i8", (8,), start, 8),
        "b": StoredTensor(path, "f32", (2, 3), start + 8, 24),
        "c": StoredTensor(path, "bf16", (0, 7), start + 64, 0),
    }
    assert list(read_header(path)) == ["a", "b", "c"]
    with pytest.raises(EngineError, match="tensor 'a' is in another weight file, too"):
        read_headers([path, path])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F64"},
        {"dtype": None},
        {"dtype": []},
        {"shape": None},
        {"shape": 6},
        {"shape": "23"},
        {"shape": [2, 3.0]},
        {"shape": [True, 6]},
        {"shape": [-2, -3]},
        {"shape": [2, 4]},
        {"shape": [1] * 9 + [6]},
        {"shape": [1 << 63, 0]},
        {"shape": {}},
        {"data_offsets": [8]},
        {"data_offsets": [8, 32, 40]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [32, 8]},
        {"data_offsets": [48, 72]},
        {"data_offsets": [8.0, 32.0]},
        {"data_offsets": [10**30, 10**30 + 24]},
        {"data_offsets": None},
    ],
)
def test_a_tensor_that_cannot_be_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "w", json.dumps({"norm": GOOD | change}).encode())
    with pytest.raises(EngineError, match=r"w cannot be read: tensor 'norm' ") as error:
        read_header(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("entry", [None, 7, "x", [], {}, [GOOD]])
def test_an_entry_that_is_none_is_refused(entry: object, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="tensor 'norm' is described as"):
        read_header(write(tmp_path / "w", json.dumps({"norm": entry}).encode()))


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000])
def test_a_header_that_is_none_is_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="w cannot be read"):
        read_header(write(tmp_path / "w", header))


@pytest.mark.parametrize("length", [1, 1000, (16 << 20) + 1, (1 << 64) - 1])
def test_a_header_of_another_length_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="w cannot be read"):
        read_header(write(tmp_path / "w", json.dumps({"norm": GOOD}).encode(), length=length))


def test_a_file_without_a_header_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\1\0\0"):
        (tmp_path / "w").write_bytes(data)
        with pytest.raises(EngineError, match="w cannot be read"):
            read_header(tmp_path / "w")
    with pytest.raises(EngineError, match="nothing cannot be read"):
        read_header(tmp_path / "nothing")
