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

UInt8 = npt.NDArray[np.uint8]
UInt16 = npt.NDArray[np.uint16]


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


_SPREAD_CODES = _move_bits(_BIT_ORDER)
_GATHER_CODES = _move_bits(tuple(_BIT_ORDER.index(i) for i in range(16)))


def _scale_tiles(tiles: int) -> int:
    """K-tiles whose scales a lane reads at once."""
    return math.gcd(4, tiles)


def pack_nvfp4(blocks: UInt8) -> UInt8:
    """Pack GGUF NVFP4 super-blocks into panels. `packing.pack_nvfp4` is quicker.

    Args:
        blocks: uint8 [..., N, K / 64 * 36], rows as GGUF stores them.
    Returns:
        uint8 [..., N / 16, 9 * K].
    """
    *lead, rows, row_bytes = blocks.shape
    tiles = row_bytes // GGUF_BLOCK_BYTES
    columns, panels = tiles * TILE_COLUMNS, rows // PANEL_ROWS
    check_shape(rows, columns)
    source = np.ascontiguousarray(blocks).reshape(-1, panels, 2, 8, tiles, GGUF_BLOCK_BYTES)
    packed = np.empty((source.shape[0], panels, 9 * columns), np.uint8)
    codes = source[..., 4:].reshape(-1, panels, 2, 8, tiles, 4, 8).transpose(0, 1, 4, 3, 5, 2, 6)
    halves = np.ascontiguousarray(codes).view(np.uint16).reshape(*packed.shape[:2], -1)
    packed[..., : 8 * columns] = np.take(_SPREAD_CODES, halves).view(np.uint8)
    s = _scale_tiles(tiles)
    scales = source[..., :4].reshape(-1, panels, 2, 8, tiles // s, s, 4).transpose(0, 1, 4, 3, 6, 5, 2)
    packed[..., 8 * columns :] = scales.reshape(*packed.shape[:2], -1)
    return packed.reshape(*lead, panels, 9 * columns)


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


def pack_bf16(weight: UInt16) -> UInt16:
    """Pack a BF16 weight, given as its bits: uint16 [..., N, K] to [..., N / 16, 16 * K].

    `packing.pack_bf16` is quicker.
    """
    *lead, rows, columns = weight.shape
    check_shape(rows, columns)
    panels, tiles = rows // PANEL_ROWS, columns // TILE_COLUMNS
    values = weight.reshape(-1, panels, 2, 8, tiles, 4, 16)
    source = values[..., _COLUMN_ORDER]  # [x, panel, half, g, tile, t, i, pair, 2]
    packed: UInt16 = source.transpose(0, 1, 4, 6, 3, 5, 7, 2, 8).reshape(*lead, panels, PANEL_ROWS * columns)
    return packed


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
