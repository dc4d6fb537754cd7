"""The plugin library's packing against the definition in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flint_plugins import layout, packing
from flint_plugins.library import ENVIRONMENT_VARIABLE, LibraryError


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 6, 8, 12, 32])
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("panels", [1, 5])
@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_as_numpy(weights: str, panels: int, matrices: int, tiles: int) -> None:
    random = np.random.default_rng(tiles)
    dtype, width = (np.uint8, 36 * tiles) if weights == "nvfp4" else (np.uint16, 64 * tiles)
    rows = panels * 16 // matrices
    parts = [random.integers(0, np.iinfo(dtype).max, (rows, width), dtype, endpoint=True) for _ in range(matrices)]
    stacked = parts[0] if matrices == 1 else layout.interleave_gate_up(*parts)
    if weights == "nvfp4":
        expected, out = layout.pack_nvfp4(stacked), np.full((panels, 16 * width), 0xA5, np.uint8)
        largest = packing.pack_nvfp4(parts, out)
        assert largest == stacked.reshape(-1, 36)[:, :4].max()
    else:
        expected, out = layout.pack_bf16(stacked), np.full((panels, 16 * width), 0xA5A5, np.uint16)
        packing.pack_bf16(parts, out)
    np.testing.assert_array_equal(out, expected)


def test_bits_of_every_half_word_move_to_their_places() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    blocks = np.zeros((1 << 17) // 32, dtype=[("scales", "u1", 4), ("codes", "<u2", 16)])
    blocks["codes"] = words.reshape(-1, 16)
    blocks["scales"][777, 2] = 0x7F
    stored = blocks.view(np.uint8).reshape(-1, 36)
    out = np.empty((len(stored) // 16, 9 * 64), np.uint8)
    assert packing.pack_nvfp4([stored], out) == 0x7F
    np.testing.assert_array_equal(out, layout.pack_nvfp4(stored))
    spread = ((words[:, None] >> np.arange(16) & 1).astype(np.uint64) << np.array(layout._BIT_ORDER, np.uint64)).sum(-1)
    codes = np.sort(out[:, :512].copy().view(np.uint16).ravel())
    np.testing.assert_array_equal(codes, np.sort(spread))


@pytest.mark.parametrize(
    ("matrices", "out"),
    [
        ([(16, 36)], (1, 575)),
        ([(16, 36)], (2, 576)),
        ([(8, 36), (16, 36)], (1, 576)),
        ([(12, 36)], (1, 576)),
        ([(16, 37)], (1, 592)),
    ],
)
def test_what_does_not_fit_never_reaches_the_library(matrices: list[tuple[int, int]], out: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit each other"):
        packing.pack_nvfp4([np.zeros(shape, np.uint8) for shape in matrices], np.zeros(out, np.uint8))


def test_an_older_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libflint_plugins.so"
    path.write_bytes(b"no library")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    with pytest.raises(LibraryError, match=r"cannot pack weights: .*Install the package again"):
        packing.pack_nvfp4([np.zeros((16, 36), np.uint8)], np.zeros((1, 576), np.uint8))
