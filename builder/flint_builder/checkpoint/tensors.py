"""What a checkpoint stores: tensors in files, and runs of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from flint_builder.checkpoint.datafile import DataFile, UInt8

StoredDType = Literal["F32", "BF16", "NVFP4"]
"""The types that Flint's weights may have; a tensor of another type keeps its own name and is refused by `check`."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint file: C order, `shape` with the fastest dimension last, as in Hugging Face."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: DataFile
    offset: int
    """Bytes from the start of the file."""
    bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: all values of the last dimension."""
        return self.bytes // prod(self.shape[:-1])

    def describe(self) -> str:
        """Type and shape for messages, such as "BF16 [64, 128]"."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a stored tensor, counted over all its leading dimensions."""

    tensor: StoredTensor
    first: int
    count: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.tensor.row_bytes

    def read_into(self, first: int, out: UInt8) -> None:
        """Read rows `first`, … (counted within these rows) to fill `out`.

        Args:
            out: uint8 [..., rows, row_bytes]; each out[i] must be contiguous, the whole need not be.
        Raises:
            CheckpointError: the file ends early or cannot be read.
        """
        offset = self.tensor.offset + (self.first + first) * self.row_bytes
        buffers = [out] if out.flags.c_contiguous else list(out)
        self.tensor.file.read_into(offset, buffers, f"tensor {self.tensor.name}")

    def read(self, first: int, count: int) -> UInt8:
        """Read `count` rows from row `first` on: uint8 [count, row_bytes]. Raises CheckpointError like `read_into`."""
        out = np.empty((count, self.row_bytes), np.uint8)
        self.read_into(first, out)
        return out

    def where(self, row: int) -> str:
        """Name a row (counted within these rows) for messages, with its expert where the tensor stacks experts."""
        row += self.first
        if len(self.tensor.shape) < 3:
            return f"row {row}"
        expert, row = divmod(row, self.tensor.shape[-2])
        return f"expert {expert}, row {row}"
