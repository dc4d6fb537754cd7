"""The kernels' weight layouts: packing and unpacking, shared by the builder, the reference executor and the tests.

A weight [N, K] (N a multiple of 16, K of 64) becomes N / 16 panels of 16 rows. A panel is cut into K-tiles of 64
columns; in a tile, lane l of a warp (g = l / 4, t = l % 4) owns columns 16t to 16t + 15 of rows g and g + 8: what it
feeds into the A operand of four m16n8k16 matrix instructions, or of wgmma with A in registers. The order of K inside a
tile is free as long as the activations use the same, so that the 16 values under one NVFP4 block scale stay with one
lane and the 8 bytes in which GGUF stores them stay together.

NVFP4 panel, 9 * K bytes, int8 [N / 16, 9 * K]:
    codes   [K / 64 tiles][32 lanes][row g, row g + 8][4 little-endian half words]
            GGUF's byte i holds value i and, 4 bits up, value i + 8; half word h has the codes of bytes 2h and 2h + 1,
            their 16 bits moved to where the kernels want them, `_BIT_ORDER`
    scales  [K / 64 / s groups][32 lanes][s tiles][row g, row g + 8] E4M3, s = gcd(4, K / 64):
            a lane reads the scales of s tiles in one load

BF16 panel, 16 * K elements, bfloat16 [N / 16, 16 * K]:
    [K / 64 tiles][4 instructions][32 lanes][8 values: the lane's A fragment]
    The fragment of instruction i is (row g, pair 0), (row g + 8, pair 0), (row g, pair 1), (row g + 8, pair 1), where
    pair 0 = columns (c, c + 2), pair 1 = (c + 8, c + 10) and c = 16t + (0, 1, 4, 5)[i]: the order in which masks and
    shifts take the codes out of NVFP4 words, so both formats share one order of activations.

Gate and up are interleaved so that a lane holds both for one unit: panel p has gate rows 8p to 8p + 7 as its rows 0
to 7 and the same up rows as its rows 8 to 15.

Arrays may carry leading dimensions (experts).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 2
PANEL_ROWS = 16
TILE_COLUMNS = 64
BLOCK_COLUMNS = 16
GGUF_BLOCK_BYTES = 36
"""A GGUF NVFP4 super-block: 4 scale bytes and 32 code bytes for 64 values."""

_INSTRUCTION_COLUMNS = (0, 1, 4, 5)
_PAIR_COLUMNS = (0, 2, 8, 10)
# Column inside a lane's 16 of [instruction, pair, element of the pair].
_COLUMN_ORDER = np.array([[c + p for p in _PAIR_COLUMNS] for c in _INSTRUCTION_COLUMNS]).reshape(4, 2, 2)

_BIT_ORDER = (6, 7, 8, 15, 3, 4, 5, 12, 0, 1, 2, 9, 14, 10, 11, 13)
"""Where bit i of a half word of GGUF codes goes; a code is mantissa, two bits of exponent, sign.

In BF16 a code's sign stands in bit 15, exponent and mantissa in bits 8 to 6. There the first code of the half word lies
as it is; the next two need one shift to the left, by 3 and by 6 (a multiplication, which has an arithmetic unit of its
own). The fourth has the bits that are left, chosen so that a shift to the right by 8 and one multiplication by
1 + 2^5 + 2^10 bring all four of them to their places (plugins/kernels/panel.cuh).
"""

_SCRATCH_BYTES = 1 << 16
"""What packing BF16 works on at once: small enough for a core's first caches."""
_NVFP4_BYTES = 1 << 18
"""What packing NVFP4 works on at once, as stored: with the tables and the scratch it fits a core's second cache, and is
large enough that numpy's cost of a call does not show."""

UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]
UInt64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.intp]


def check_shape(rows: int, columns: int) -> None:
    """Raise ValueError unless a [rows, columns] weight fits the panels."""
    if rows % PANEL_ROWS or columns % TILE_COLUMNS:
        raise ValueError(
            f"a weight [{rows}, {columns}] cannot be packed: rows must be a multiple of {PANEL_ROWS}, "
            f"columns of {TILE_COLUMNS}"
        )


def interleave_gate_up(gate: npt.NDArray, up: npt.NDArray) -> npt.NDArray:
    """Stack gate and up [..., I, X] into [..., 2 * I, X], 8 rows of each in turn."""
    *lead, rows, width = gate.shape
    blocks = [x.reshape(*lead, rows // 8, 8, width) for x in (gate, up)]
    return np.stack(blocks, axis=-3).reshape(*lead, 2 * rows, width)


def split_gate_up(gate_up: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """Undo `interleave_gate_up`: [..., 2 * I, X] to two [..., I, X]."""
    *lead, rows, width = gate_up.shape
    blocks = gate_up.reshape(*lead, rows // 16, 2, 8, width)
    gate, up = (blocks[..., i, :, :].reshape(*lead, rows // 2, width) for i in range(2))
    return gate, up


def _move_bits(order: tuple[int, ...]) -> UInt16:
    """Table of all half words with bit i moved to order[i]."""
    word = np.arange(1 << 16, dtype=np.uint32)
    moved = sum((word >> i & 1) << to for i, to in enumerate(order))
    return np.asarray(moved, np.uint16)


_GATHER_CODES = _move_bits(tuple(_BIT_ORDER.index(i) for i in range(16)))


def _scale_tiles(tiles: int) -> int:
    """K-tiles whose scales a lane reads at once."""
    return math.gcd(4, tiles)


def pack_nvfp4(blocks: UInt8, out: UInt8 | None = None) -> UInt8:
    """Pack GGUF NVFP4 super-blocks into panels.

    Args:
        blocks: uint8 [..., N, K / 64 * 36], rows as GGUF stores them.
        out: where to write; uint8 [..., N / 16, 9 * K].
    Returns:
        uint8 [..., N / 16, 9 * K]; `out` if given.
    """
    *lead, rows, row_bytes = blocks.shape
    tiles = row_bytes // GGUF_BLOCK_BYTES
    columns = tiles * TILE_COLUMNS
    check_shape(rows, columns)
    panels = rows // PANEL_ROWS
    if out is None:
        out = np.empty((*lead, panels, 9 * columns), np.uint8)
    source = blocks.reshape(-1, PANEL_ROWS * row_bytes)  # a panel as stored has as many bytes as a packed one
    packed = out.reshape(source.shape)
    code_order, scale_order = _nvfp4_order(tiles)
    step = len(code_order)
    words, scratch = np.empty((2, step, code_order.shape[1]), np.uint32)
    scales = np.empty((step, scale_order.shape[1]), np.uint8)
    for first in range(0, len(source), step):
        panel = source[first : first + step].reshape(-1)
        count = min(step, len(source) - first)
        # mode="wrap" spares numpy a copy of what it writes; no index leaves the panels.
        np.take(panel.view(np.uint32), code_order[:count], out=words[:count], mode="wrap")
        np.take(panel, scale_order[:count], out=scales[:count], mode="wrap")
        target = packed[first : first + step]
        _spread_codes(
            words[:count].view(np.uint16), scratch[:count].view(np.uint16), target[:, : 8 * columns].view(np.uint16)
        )
        target[:, 8 * columns :] = scales[:count]
    return out


@lru_cache(maxsize=16)
def _nvfp4_order(tiles: int) -> tuple[Index, Index]:
    """Where the parts of packed panels stand in the stored ones, for as many panels as are packed at once.

    Returns:
        of the codes, [panels, 2 * K], counted in words of 4 bytes; of the scales, [panels, K], counted in bytes.
    """
    panel_bytes = PANEL_ROWS * tiles * GGUF_BLOCK_BYTES
    panels = max(1, _NVFP4_BYTES // panel_bytes)
    stored = np.arange(panels * panel_bytes).reshape(panels, 2, 8, tiles, GGUF_BLOCK_BYTES)  # [panel, half, g, tile]
    codes = stored[..., 4::4].reshape(panels, 2, 8, tiles, 4, 2) // 4  # [panel, half, g, tile, t, word]
    s = _scale_tiles(tiles)
    scales = stored[..., :4].reshape(panels, 2, 8, tiles // s, s, 4)  # [panel, half, g, group, tile, t]
    return codes.transpose(0, 3, 2, 4, 1, 5).reshape(panels, -1), scales.transpose(0, 3, 2, 5, 4, 1).reshape(panels, -1)


def _spread_codes(words: UInt16, scratch: UInt16, out: UInt16) -> None:
    """Move the bits of half words as `_BIT_ORDER` says, into `out`.

    A table of all half words would be shorter to write, but numpy looks up one at a time, and does these 14 operations
    on many at once. A factor of several powers of two shifts by each of them: the mask before it leaves the copies
    room, the mask behind it keeps the wanted ones. No fewer operations were found in a search over such sums.

    Args:
        words: to be moved; is overwritten.
        scratch: of the same shape, to work in.
    """
    np.right_shift(words, 6, out=scratch)
    _move(scratch, 0x019E, 1 << 0 | 1 << 5 | 1 << 13, 0x701C, scratch)
    _move(words, 0x8847, 1 << 0 | 1 << 1 | 1 << 8, 0x8F80, out)
    np.bitwise_or(scratch, out, out=scratch)
    np.right_shift(scratch, 2, out=scratch)
    np.right_shift(words, 1, out=words)
    _move(words, 0x081C, 1 << 0 | 1 << 3 | 1 << 13, 0xC018, words)
    np.bitwise_or(scratch, words, out=out)


def _move(words: UInt16, bits: int, factor: int, kept: int, out: UInt16) -> None:
    """(words & bits) * factor & kept."""
    np.bitwise_and(words, bits, out=out)
    np.multiply(out, factor, out=out)
    np.bitwise_and(out, kept, out=out)


def nvfp4_scales(packed: UInt8) -> UInt8:
    """The scale bytes of panels, a view: uint8 [..., N / 16, 9 * K] to [..., N / 16, K], in the order of the lanes."""
    return packed[..., packed.shape[-1] // 9 * 8 :]


def unpack_nvfp4(packed: UInt8) -> UInt8:
    """Undo `pack_nvfp4`: uint8 or int8 [..., N / 16, 9 * K] to GGUF super-blocks [..., N, K / 64 * 36]."""
    *lead, panels, panel_bytes = packed.shape
    columns = panel_bytes // 9
    tiles, rows = columns // TILE_COLUMNS, panels * PANEL_ROWS
    flat = np.ascontiguousarray(packed).view(np.uint8).reshape(-1, panels, panel_bytes)
    blocks = np.empty((flat.shape[0], panels, 2, 8, tiles, GGUF_BLOCK_BYTES), np.uint8)
    halves = np.ascontiguousarray(flat[..., : 8 * columns]).view(np.uint16)
    codes = np.take(_GATHER_CODES, halves).view(np.uint8).reshape(-1, panels, tiles, 8, 4, 2, 8)
    blocks[..., 4:] = codes.transpose(0, 1, 5, 3, 2, 4, 6).reshape(-1, panels, 2, 8, tiles, 32)
    s = _scale_tiles(tiles)
    scales = flat[..., 8 * columns :].reshape(-1, panels, tiles // s, 8, 4, s, 2)
    blocks[..., :4] = scales.transpose(0, 1, 6, 3, 2, 5, 4).reshape(-1, panels, 2, 8, tiles, 4)
    return blocks.reshape(*lead, rows, tiles * GGUF_BLOCK_BYTES)


def pack_bf16(weight: UInt16, out: UInt16 | None = None) -> UInt16:
    """Pack a BF16 weight, given as its bits.

    Args:
        weight: uint16 [..., N, K].
        out: where to write; uint16 [..., N / 16, 16 * K].
    Returns:
        uint16 [..., N / 16, 16 * K]; `out` if given.
    """
    *lead, rows, columns = weight.shape
    check_shape(rows, columns)
    panels, tiles = rows // PANEL_ROWS, columns // TILE_COLUMNS
    if out is None:
        out = np.empty((*lead, panels, PANEL_ROWS * columns), np.uint16)
    source = weight.reshape(-1, 2, 8, tiles, 4, 2, 8).view(np.uint64)  # [panel, half, g, tile, t, pair, i / 2]
    packed = out.reshape(-1, tiles, PANEL_ROWS * TILE_COLUMNS).view(np.uint64).reshape(-1, tiles, 2, 2, 8, 4, 2)
    # packed: [panel, tile, i / 2, i % 2, g, t, pair]; an element holds the pairs of rows g and g + 8
    step = max(1, _SCRATCH_BYTES // (2 * PANEL_ROWS * columns))
    scratch = np.empty((2, min(step, len(source)), *source.shape[1:]), np.uint64)
    for first in range(0, len(source), step):
        block = source[first : first + step]
        _pair_rows(block, scratch[:, : len(block)], packed[first : first + step])
    return out


def _pair_rows(words: UInt64, scratch: UInt64, packed: UInt64) -> None:
    """Pack panels whose four columns c to c + 3 are the 16-bit fields of one word.

    Exchanging the middle two fields leaves instruction c's pair (c, c + 2) in the low half of the word and the next
    instruction's pair in the high half; the halves of rows g and g + 8 then belong together.
    """
    swapped, other = scratch
    middle, low = np.uint64(0xFFFF0000), np.uint64(0xFFFFFFFF)
    np.bitwise_and(words, ~(middle | middle << 16), out=swapped)
    np.left_shift(np.bitwise_and(words, middle, out=other), 16, out=other)
    swapped |= other
    np.bitwise_and(np.right_shift(words, 16, out=other), middle, out=other)
    swapped |= other
    upper, lower = swapped[:, 0], swapped[:, 1]
    even, odd = other[:, 0], other[:, 1]
    order = (0, 2, 5, 1, 3, 4)
    np.left_shift(lower, 32, out=even)
    even |= np.bitwise_and(upper, low, out=odd)
    packed[:, :, :, 0] = even.transpose(order)
    np.right_shift(upper, 32, out=odd)
    odd |= np.bitwise_and(lower, ~low, out=even)
    packed[:, :, :, 1] = odd.transpose(order)


def unpack_bf16(packed: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Undo `pack_bf16`: uint16 [..., N / 16, 16 * K] to [..., N, K]."""
    *lead, panels, width = packed.shape
    columns = width // PANEL_ROWS
    tiles, rows = columns // TILE_COLUMNS, panels * PANEL_ROWS
    fragments = packed.reshape(-1, panels, tiles, 4, 8, 4, 2, 2, 2)  # [x, panel, tile, i, g, t, pair, half, 2]
    weight = np.empty((fragments.shape[0], panels, 2, 8, tiles, 4, 16), np.uint16)
    weight[..., _COLUMN_ORDER] = fragments.transpose(0, 1, 7, 4, 2, 5, 3, 6, 8)
    return weight.reshape(*lead, rows, columns)


# Code 8, minus zero, is read as plus zero, as ggml does.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table() -> npt.NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[0x7F] = 0
    return value.astype(np.float32)


E4M3_VALUES = _e4m3_table()
"""Value of a scale byte as ggml decodes it: bit 7 is ignored and 0x7F, E4M3's NaN, is 0."""


def dequantize_blocks(blocks: UInt8) -> npt.NDArray[np.float32]:
    """Value of GGUF super-blocks without their tensor scale: uint8 [..., K / 64 * 36] to float32 [..., K].

    value = e4m3(scale) * e2m1(code), exact in BF16.
    """
    *lead, row_bytes = blocks.shape
    tiles = row_bytes // GGUF_BLOCK_BYTES
    source = np.ascontiguousarray(blocks).reshape(*lead, tiles, GGUF_BLOCK_BYTES)
    codes = source[..., 4:].reshape(*lead, tiles, 4, 8)
    values = np.concatenate([E2M1_VALUES[codes & 15], E2M1_VALUES[codes >> 4]], axis=-1)
    values *= E4M3_VALUES[source[..., :4]][..., None]
    return values.reshape(*lead, tiles * TILE_COLUMNS)
