"""NVFP4 quantiser in numpy, in the super-block layout of GGML type 40.

A super-block holds 64 consecutive values of a row in 36 bytes: four E4M3 scale bytes, one per 16 values, then four
times eight bytes of E2M1 codes. Within 16 values the low nibbles are values 0-7 and the high nibbles values 8-15.

    value = e4m3(scale byte) * e2m1(code) * tensor_scale

Scales follow NVIDIA's two-level recipe: ``tensor_scale = amax / (6 * 448)``, and a block's scale is its own amax / 6
in units of the tensor scale, rounded to nearest even. The largest block of a tensor therefore gets scale 448.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

BLOCK_VALUES = 16
SUPER_VALUES = 64
SUPER_BYTES = 36
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MAX_BYTE = 0x7E

E2M1_VALUES: F32 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
    dtype=np.float32,
)


def _e4m3_table() -> F32:
    """Values of the 256 E4M3 bytes, [256] f32; 0x7F and 0xFF are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte >= 128, -magnitude, magnitude).astype(np.float32)


E4M3_VALUES: F32 = _e4m3_table()


def encode_e4m3(x: F32) -> U8:
    """Round non-negative f32 to E4M3 bytes, nearest even, saturating at 448 (0x7E); bit 7 is never set.

    Args:
        x: any shape, f32, finite, >= 0.
    """
    _, exponent = np.frexp(x)
    exponent = np.maximum(exponent - 1, -6)  # x = m * 2**exponent with 1 <= m < 2, or subnormal
    steps = np.rint(np.ldexp(x, 3 - exponent)).astype(np.int32)  # 8..16, below 8 only for subnormals
    byte = np.minimum((exponent + 6) * 8 + steps, E4M3_MAX_BYTE)
    result: U8 = np.where(x > 0, byte, 0).astype(np.uint8)
    return result


def encode_e2m1(x: F32) -> U8:
    """Round f32 to 4-bit E2M1 codes 0-15, nearest even, saturating at +-6; the sign of zero is kept."""
    magnitude = np.abs(x)
    code: U8 = (magnitude > 0.25).astype(np.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    result: U8 = code | (np.signbit(x).astype(np.uint8) << np.uint8(3))
    return result


def tensor_scale_of(*matrices: F32) -> np.float32:
    """``amax / (6 * 448)`` over all matrices; 1.0 if every value is zero."""
    amax = np.float32(max(float(np.max(np.abs(m), initial=0.0)) for m in matrices))
    scale: np.float32 = amax / np.float32(E2M1_MAX * E4M3_MAX)
    return scale if scale > 0 else np.float32(1.0)


def quantize(x: F32, tensor_scale: np.float32 | None = None) -> tuple[U8, np.float32]:
    """Quantise matrices that share one tensor scale.

    Args:
        x: [..., N, K] f32, K a multiple of 64.
        tensor_scale: use this scale instead of the one of `x` (for tensors that share a scale).

    Returns:
        blocks [..., N, K // 64 * 36] u8, and the tensor scale.

    Raises:
        ValueError: K is not a multiple of 64, or `x` holds NaN or infinity.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    k = x.shape[-1]
    if k % SUPER_VALUES:
        raise ValueError(f"K = {k} is not a multiple of {SUPER_VALUES}")
    if not np.isfinite(x).all():
        raise ValueError("cannot quantise NaN or infinity")
    scale = tensor_scale_of(x) if tensor_scale is None else np.float32(tensor_scale)
    values = x.reshape(*x.shape[:-1], k // SUPER_VALUES, 4, BLOCK_VALUES)
    block_amax = np.abs(values).max(axis=-1)
    scale_bytes = encode_e4m3(block_amax / np.float32(E2M1_MAX) / scale)
    divisor = (E4M3_VALUES[scale_bytes] * scale)[..., None]
    ratio = np.divide(values, divisor, out=np.zeros_like(values), where=divisor > 0)
    codes = encode_e2m1(ratio)
    packed = codes[..., :8] | (codes[..., 8:] << np.uint8(4))
    blocks = np.concatenate([scale_bytes, packed.reshape(*scale_bytes.shape[:-1], 32)], axis=-1)
    return blocks.reshape(*x.shape[:-1], k // SUPER_VALUES * SUPER_BYTES), scale


def quantize_shared(matrices: Sequence[F32]) -> tuple[list[U8], np.float32]:
    """Quantise several [N_i, K_i] matrices (q, k, v of a layer; gate and up) under one common tensor scale."""
    scale = tensor_scale_of(*matrices)
    return [quantize(m, scale)[0] for m in matrices], scale


def quantize_experts(*stacks: F32) -> tuple[list[U8], F32]:
    """Quantise stacked experts with one tensor scale per expert, shared between the stacks (gate and up).

    Args:
        stacks: each [E, N_i, K_i] f32.

    Returns:
        one [E, N_i, K_i // 64 * 36] u8 per stack, and the scales [E] f32.
    """
    quantized = [quantize_shared([stack[e] for stack in stacks]) for e in range(stacks[0].shape[0])]
    blocks = [np.stack([parts[i] for parts, _ in quantized]) for i in range(len(stacks))]
    return blocks, np.array([scale for _, scale in quantized], dtype=np.float32)


def unpack(blocks: U8) -> tuple[U8, U8]:
    """Split [..., N, K // 64 * 36] u8 into codes [..., N, K] u8 (0-15) and scale bytes [..., N, K // 16] u8."""
    supers = blocks.reshape(*blocks.shape[:-1], -1, SUPER_BYTES)
    packed = supers[..., 4:].reshape(*supers.shape[:-1], 4, 8)
    codes = np.concatenate([packed & np.uint8(0xF), packed >> np.uint8(4)], axis=-1)
    return codes.reshape(*blocks.shape[:-1], -1), supers[..., :4].reshape(*blocks.shape[:-1], -1)


def dequantize(blocks: U8, tensor_scale: np.float32 | float | F32) -> F32:
    """Invert `quantize` or `quantize_experts`.

    Args:
        blocks: [..., N, K // 64 * 36] u8.
        tensor_scale: a scalar, [1], or [E] f32 for blocks [E, N, ...].

    Returns:
        [..., N, K] f32.
    """
    codes, scale_bytes = unpack(blocks)
    values = E2M1_VALUES[codes] * np.repeat(E4M3_VALUES[scale_bytes], BLOCK_VALUES, axis=-1)
    scale = np.asarray(tensor_scale, dtype=np.float32)
    if scale.size == 1:
        scale = scale.reshape(())
    else:
        scale = scale.reshape(-1, *([1] * (values.ndim - 1)))
    result: F32 = values * scale
    return result
