"""Hashing many files at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from flint_runtime import hashing
from flint_runtime.hashing import hash_files


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, bytes]:
    """Files around the size of a chunk."""
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 1000)
    found = {}
    for index, size in enumerate([0, 1, 999, 1000, 1001, 5000, 123_456]):
        found[tmp_path / str(index)] = bytes([index]) * size
        (tmp_path / str(index)).write_bytes(bytes([index]) * size)
    return found


def test_hashes_come_in_the_order_asked_for(files: dict[Path, bytes]) -> None:
    done: list[int] = []
    paths = [*reversed(files), *files]
    assert list(hash_files(paths, done.append)) == [blake3(files[path]).hexdigest() for path in paths]
    assert sum(done) == 2 * sum(map(len, files.values()))


def test_what_cannot_be_read_is_one_result(files: dict[Path, bytes], tmp_path: Path) -> None:
    first, second, third = hash_files([tmp_path / "nothing", next(iter(files)), tmp_path], lambda count: None)
    assert isinstance(first, FileNotFoundError) and isinstance(third, IsADirectoryError)
    assert second == blake3(b"").hexdigest()


def test_nothing_goes_on_when_the_caller_leaves(files: dict[Path, bytes]) -> None:
    before = threading.active_count()
    results = hash_files(list(files) * 100, lambda count: None)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_an_exception_of_progress_reaches_the_caller(files: dict[Path, bytes]) -> None:
    def fail(count: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        list(hash_files(list(files), fail))


def test_every_byte_is_asked_for_once_and_before_it_is_read(
    files: dict[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_AHEAD_BYTES", 8000)
    asked: list[tuple[int, int]] = []
    read = 0

    def record(descriptor: int, offset: int, count: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert offset == sum(count for _, count in asked), "blocks follow each other"
        asked.append((offset, count))

    def progress(count: int) -> None:
        nonlocal read
        read += count
        ahead = sum(count for _, count in asked) - read
        assert 0 <= ahead <= 2 * 8000, "never more than the block being read and the next"

    monkeypatch.setattr(os, "posix_fadvise", record)
    largest = max(files, key=lambda path: len(files[path]))
    assert list(hash_files([largest], progress)) == [blake3(files[largest]).hexdigest()]
    assert read == len(files[largest])
