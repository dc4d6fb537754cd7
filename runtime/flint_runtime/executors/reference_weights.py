"""Packed weights as plain FP64 matrices, for the reference executor."""

from __future__ import annotations

import torch

from flint_plugins.layout import dequantize_blocks, split_gate_up, unpack_bf16, unpack_nvfp4

DEFAULT_BUDGET_BYTES = 4 << 30


def unpack(packed: torch.Tensor, gate_up: bool = False) -> torch.Tensor:
    """Unpack one weight: int8 [N / 16, 9 * K] (NVFP4) or bfloat16 [N / 16, 16 * K] to float64 [N, K].

    Every value is exact in BF16: the bits of a BF16 weight, or e2m1 * e4m3 without the tensor scale.

    Args:
        gate_up: undo the interleaving of gate and up; the result has all gate rows, then all up rows.
    """
    if packed.dtype == torch.int8:
        matrix = torch.from_numpy(dequantize_blocks(unpack_nvfp4(packed.numpy().view("uint8")))).double()
    else:
        bits = unpack_bf16(packed.contiguous().view(torch.int16).numpy().view("uint16"))
        matrix = torch.from_numpy(bits.view("int16")).view(torch.bfloat16).double()
    if gate_up:
        matrix = torch.cat([torch.from_numpy(part) for part in split_gate_up(matrix.numpy())])
    return matrix.contiguous()


class WeightCache:
    """Unpacks weights on first use and keeps the FP64 form, up to a number of bytes; beyond, unpacks on each use."""

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._left_bytes = budget_bytes
        # The packed tensor is kept, too, so that no other can take its address.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def matrix(self, packed: torch.Tensor, gate_up: bool = False) -> torch.Tensor:
        """`unpack(packed, gate_up)`, cached by the packed tensor's address."""
        kept = self._kept.get(packed.data_ptr())
        if kept is not None:
            return kept[1]
        matrix = unpack(packed, gate_up)
        if matrix.nbytes <= self._left_bytes:
            self._left_bytes -= matrix.nbytes
            self._kept[packed.data_ptr()] = (packed, matrix)
        return matrix
