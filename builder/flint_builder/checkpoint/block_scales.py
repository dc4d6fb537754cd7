"""NVFP4 block scales: the bytes that E4M3 does not have as scales, and what ggml makes of them.

ggml reads a scale byte as unsigned: it ignores bit 7 and takes 0x7F, E4M3's NaN, for 0, but not 0xFF, which becomes
480. So a lenient reading clears bit 7 and turns 0x7F into 0; 480 has no E4M3 code, and 0xFF stays an error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flint_builder.checkpoint.datafile import UInt8
from flint_plugins.layout import GGUF_BLOCK_BYTES

LARGEST_SCALE = 0x7E
UNREPRESENTABLE_SCALE = 0xFF
BLOCKS_PER_SUPER_BLOCK = 4


def scale_bytes(blocks: UInt8) -> UInt8:
    """The scale bytes of super-blocks, copied: uint8 [..., K / 64 * 36] to [..., K / 16]."""
    *lead, row_bytes = blocks.shape
    supers = blocks.reshape(*lead, row_bytes // GGUF_BLOCK_BYTES, GGUF_BLOCK_BYTES)
    words = supers.view(np.uint32)[..., 0]
    return np.ascontiguousarray(words).view(np.uint8).reshape(*lead, -1)


def set_scale_bytes(blocks: UInt8, scales: UInt8) -> None:
    """Undo `scale_bytes`, in place."""
    *lead, row_bytes = blocks.shape
    supers = blocks.reshape(*lead, row_bytes // GGUF_BLOCK_BYTES, GGUF_BLOCK_BYTES)
    supers[..., :BLOCKS_PER_SUPER_BLOCK] = scales.reshape(*supers.shape[:-1], BLOCKS_PER_SUPER_BLOCK)


def any_irregular(scales: UInt8) -> bool:
    """Whether a scale byte is 0x7F or has bit 7 set."""
    return scales.size > 0 and int(scales.max()) > LARGEST_SCALE


def irregular(scales: UInt8) -> npt.NDArray[np.bool_] | None:
    """Which scale bytes are 0x7F or have bit 7 set; None if there is none."""
    return scales > LARGEST_SCALE if any_irregular(scales) else None


def as_ggml(scales: UInt8) -> UInt8:
    """Scale bytes with ggml's meaning in E4M3's codes. 0xFF must not occur."""
    return np.where(scales == 0x7F, 0, scales & 0x7F).astype(np.uint8)
