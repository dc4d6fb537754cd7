"""Reading a checkpoint file: what is asked of the kernel ahead of the reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from flint_builder.checkpoint import datafile
from flint_builder.checkpoint.datafile import DataFile

BLOCK = 4096


@pytest.mark.parametrize("step", [512, 1000, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("start", [0, 100])
def test_each_block_is_asked_for_once_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, start: int
) -> None:
    monkeypatch.setattr(datafile, "_AHEAD_BYTES", BLOCK)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, count, advice: asked.append((offset, count)))
    content = np.random.default_rng(0).integers(0, 256, 12 * BLOCK, np.uint8)
    path = tmp_path / "data"
    path.write_bytes(content.tobytes())
    file = DataFile(path)
    for offset in range(start, 10 * BLOCK, step):
        out = np.empty(step if offset + step <= content.size else content.size - offset, np.uint8)
        file.read_into(offset, [out], "a tensor")
        np.testing.assert_array_equal(out, content[offset : offset + len(out)])
    assert asked
    assert all(offset % BLOCK == 0 and count == BLOCK for offset, count in asked)
    assert len(asked) == len(set(asked))
    if step <= BLOCK:
        assert {offset // BLOCK for offset, _ in asked} >= set(range(2, 10))
