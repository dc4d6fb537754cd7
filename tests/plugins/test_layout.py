"""The packed layouts: round trips, values, and that lanes find in them what the matrix instructions want."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_plugins import layout

shapes = st.tuples(
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6, 8])
)  # leading dimensions, panels, K-tiles
seeds = st.integers(0, 2**32 - 1)


def random_blocks(seed: int, lead: list[int], rows: int, tiles: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*lead, rows, tiles * layout.GGUF_BLOCK_BYTES), np.uint8)


@settings(deadline=None)
@given(shapes, seeds)
def test_nvfp4_round_trip(size: tuple[list[int], int, int], seed: int) -> None:
    lead, panels, tiles = size
    blocks = random_blocks(seed, lead, 16 * panels, tiles)
    packed = layout.pack_nvfp4(blocks)
    assert packed.shape == (*lead, panels, 9 * 64 * tiles)
    np.testing.assert_array_equal(layout.unpack_nvfp4(packed), blocks)
    np.testing.assert_array_equal(layout.unpack_nvfp4(packed.view(np.int8)), blocks)


@pytest.mark.parametrize(
    ("kind", "tiles", "digest"),
    [
        ("nvfp4", 1, "7eff61d67ae321ea"),
        ("bf16", 1, "e4e78b51d9e4fa30"),
        ("nvfp4", 2, "249cdcf07bdeed2a"),
        ("bf16", 2, "5423a517251e1e3c"),
        ("nvfp4", 3, "1f6b84ef5a7cee62"),
        ("bf16", 3, "388d5106ac685706"),
        ("nvfp4", 4, "c9a686e2502cc526"),
        ("bf16", 4, "cc24c043555fac9a"),
        ("nvfp4", 8, "786ee974873ed321"),
        ("bf16", 8, "353f5058dc0e4ab8"),
        ("nvfp4", 32, "98aff6562c7e0ccf"),
        ("bf16", 32, "26806fdb862cb175"),
    ],
)
def test_bytes_of_layout_version_2(kind: str, tiles: int, digest: str) -> None:
    """Engines on disk hold these bytes: who changes them raises LAYOUT_VERSION."""
    assert layout.LAYOUT_VERSION == 2
    stored = (np.arange(2 * 32 * tiles * 36, dtype=np.uint64) * 0x9E3779B97F4A7C15 >> 40).astype(np.uint8)
    if kind == "nvfp4":
        packed = layout.pack_nvfp4(stored.reshape(2, 32, -1))
    else:
        bits = stored[: 2 * 32 * tiles * 32].astype(np.uint16) * 257 + 1
        packed = layout.pack_bf16(np.resize(bits, (32, 64 * tiles)))  # type: ignore[assignment]
    assert hashlib.sha256(packed.tobytes()).hexdigest()[:16] == digest


@settings(deadline=None)
@given(shapes, seeds)
def test_bf16_round_trip(size: tuple[list[int], int, int], seed: int) -> None:
    lead, panels, tiles = size
    weight = np.random.default_rng(seed).integers(0, 2**16, (*lead, 16 * panels, 64 * tiles), np.uint16)
    packed = layout.pack_bf16(weight)
    assert packed.shape == (*lead, panels, 16 * 64 * tiles)
    np.testing.assert_array_equal(layout.unpack_bf16(packed), weight)


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (16, 32), (24, 64), (16, 96)])
def test_shapes_that_do_not_fit_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{rows}, {columns}\] cannot be packed"):
        layout.check_shape(rows, columns)


def all_codes_under_all_scales() -> npt.NDArray[np.uint8]:
    """Super-blocks [64 * 36] in which each of the 256 scale bytes stands over all 16 codes."""
    blocks = np.empty((64, layout.GGUF_BLOCK_BYTES), np.uint8)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    blocks[:, 4:] = np.tile(np.arange(8) | (np.arange(8) + 8) << 4, 4)
    return blocks.reshape(-1)


def test_values_equal_gguf_bit_for_bit() -> None:
    blocks = all_codes_under_all_scales()
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
    found = layout.dequantize_blocks(blocks)
    np.testing.assert_array_equal(found.view(np.uint32), expected.reshape(-1).view(np.uint32))


def test_values_are_exact_in_bf16() -> None:
    bits = layout.dequantize_blocks(all_codes_under_all_scales()).view(np.uint32)
    assert not (bits & 0xFFFF).any()


def test_gate_and_up_share_panels() -> None:
    gate = np.arange(2 * 24 * 5).reshape(2, 24, 5)
    up = -gate - 1
    both = layout.interleave_gate_up(gate, up)
    for panel in range(3):
        rows = both[:, 16 * panel : 16 * panel + 16]
        np.testing.assert_array_equal(rows[:, :8], gate[:, 8 * panel : 8 * panel + 8])
        np.testing.assert_array_equal(rows[:, 8:], up[:, 8 * panel : 8 * panel + 8])
    for found, expected in zip(layout.split_gate_up(both), (gate, up), strict=True):
        np.testing.assert_array_equal(found, expected)


# --- What a kernel does -------------------------------------------------------------------------------------------


def place_codes(word: int, j: int) -> int:
    """Code j of both halves of a word as a pair of BF16, times 2^-126: what panel.cuh does, with 32-bit integers."""
    if j == 3:
        product = (word >> 8 & 0x006C006C) * (1 + (1 << 5) + (1 << 10))
    else:
        product = word << 3 * j
    return product & 0x81C081C0


def nvfp4_fragment(panel: npt.NDArray[np.uint8], tiles: int, tile: int, lane: int) -> npt.NDArray[np.float32]:
    """The A fragments [4 instructions, 8] of one lane, with a kernel's loads, masks and shifts.

    In m16n8k16 a lane's A fragment is (row g, pair 0), (row g + 8, pair 0), (row g, pair 1), (row g + 8, pair 1).
    """
    codes = panel[(tile * 32 + lane) * 16 :][:16].view(np.uint32).reshape(2, 2)  # [half, word]
    group = int(np.gcd(4, tiles))
    scales = panel[64 * tiles * 8 :][((tile // group) * 32 + lane) * group * 2 :][: group * 2].reshape(group, 2)
    fragments = np.empty((4, 8), np.float32)
    for instruction in range(4):
        values = []
        for pair in range(2):
            for half in range(2):
                pairs = place_codes(int(codes[half, instruction // 2]), 2 * (instruction % 2) + pair)
                bits = np.array([pairs << 16, pairs & 0xFFFF0000], np.uint64).astype(np.uint32)
                values += [*(bits.view(np.float32) * 2.0**126 * layout.E4M3_VALUES[scales[tile % group, half]])]
        fragments[instruction] = values
    return fragments


def bf16_fragment(panel: npt.NDArray[np.uint16], tiles: int, tile: int, lane: int) -> npt.NDArray[np.float32]:
    """The A fragments [4 instructions, 8] of one lane: 16 consecutive bytes per instruction."""
    words = [panel[((tile * 4 + instruction) * 32 + lane) * 8 :][:8] for instruction in range(4)]
    return (np.stack(words).astype(np.uint32) << 16).view(np.float32)


def instruction_column(instruction: int, k: int) -> int:
    """The column of a 64-wide tile that index k of an instruction's 16 stands for: the order of the activations."""
    pair, within = divmod(k, 8)
    t, element = divmod(within, 2)
    return 16 * t + (0, 1, 4, 5)[instruction] + (0, 8)[pair] + 2 * element


def a_matrices(fragments: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The matrices A [4 instructions, 16, 16] that the fragments [32 lanes, 4, 8] make up (PTX, m16n8k16)."""
    a = np.full((4, 16, 16), np.nan, np.float32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for index in range(8):
            row = g + 8 * (index // 2 % 2)
            column = 2 * t + index % 2 + 8 * (index // 4)
            a[:, row, column] = fragments[lane, :, index]
    return a


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
def test_lanes_find_their_fragments(kind: str, tiles: int) -> None:
    """Each lane's fragments make up A with the documented columns, and the instructions add up to W @ x."""
    rng = np.random.default_rng(tiles)
    rows, columns = 32, 64 * tiles
    if kind == "nvfp4":
        blocks = random_blocks(tiles, [], rows, tiles)
        blocks.reshape(rows, tiles, 36)[..., :4] &= 0x3F  # Moderate scales, so that sums are exact in FP64.
        weight, packed, fragment = layout.dequantize_blocks(blocks), layout.pack_nvfp4(blocks), nvfp4_fragment
    else:
        bits = (rng.standard_normal((rows, columns)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        weight = (bits.astype(np.uint32) << 16).view(np.float32)
        packed, fragment = layout.pack_bf16(bits), bf16_fragment  # type: ignore[assignment]
    x = rng.integers(-8, 9, (columns, 8)).astype(np.float64)

    product = np.zeros((rows, 8))
    for panel in range(rows // 16):
        for tile in range(tiles):
            a = a_matrices(np.stack([fragment(packed[panel], tiles, tile, lane) for lane in range(32)]))
            for instruction in range(4):
                order = [64 * tile + instruction_column(instruction, k) for k in range(16)]
                expected = weight[16 * panel : 16 * panel + 16, order]
                np.testing.assert_array_equal(a[instruction], expected)
                product[16 * panel : 16 * panel + 16] += a[instruction].astype(np.float64) @ x[order]
    np.testing.assert_allclose(product, weight.astype(np.float64) @ x, rtol=0, atol=1e-9)


def test_instructions_cover_a_tile_once() -> None:
    columns = sorted(instruction_column(instruction, k) for instruction in range(4) for k in range(16))
    assert columns == list(range(64))
