"""The RoPE table of the sliding layers: the builder writes it, and opening an engine compares it with rope_theta."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def inverse_frequencies(dim: int, theta: float) -> npt.NDArray[np.float32]:
    """1 / theta^(2i / dim): float32 [dim / 2].

    transformers computes this with torch in float32. Here the power is taken in float64 and rounded: the correctly
    rounded value, which torch's fast float32 power meets or misses by one unit in the last place, depending on the
    CPU (it meets all 64 of the released model).
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    inverse: npt.NDArray[np.float32] = np.float32(1) / power
    return inverse


def rope_rows(first: int, last: int, dim: int, theta: float) -> npt.NDArray[np.float32]:
    """Rows of the table for positions `first` to `last` - 1: float32 [last - first, dim], cosines then sines.

    The angle, position * inverse frequency, is a float32 product as in transformers; its cosine and sine are
    taken in float64 and rounded.
    """
    angle = np.arange(first, last).astype(np.float32)[:, None] * inverse_frequencies(dim, theta)
    wide = angle.astype(np.float64)
    return np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)


def rope_table(rows: int, dim: int, theta: float) -> npt.NDArray[np.float32]:
    """The whole table: float32 [rows, dim]; see `rope_rows`."""
    return rope_rows(0, rows, dim, theta)


def is_rope_row(row: npt.NDArray[np.float32], position: int, theta: float) -> bool:
    """Whether `row`, float32 [dim], is the table's at a position, up to what another machine's power may differ."""
    with np.errstate(all="ignore"):
        angle = np.float32(position) * inverse_frequencies(len(row), theta)
        wanted = rope_rows(position, position + 1, len(row), theta)[0]
        # One unit in the last place of a frequency, and one of the product.
        tolerance = (np.concatenate([angle, angle]) + 1) * 2.0**-22
        return wanted.shape == row.shape and bool((np.abs(wanted - row) <= tolerance).all())
