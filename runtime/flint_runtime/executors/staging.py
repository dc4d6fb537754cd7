"""Small arrays in one block of bytes, so that each step takes one copy to the GPU and one back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MAX_LOGPROBS, PAGE_TOKENS
from flint_runtime.manifest import Limits

Array = npt.NDArray[np.int32] | npt.NDArray[np.float32]
ArrayTypes = Mapping[str, tuple[type[np.int32 | np.float32], tuple[str, ...]]]
"""Dtype and shape of arrays by name; a dimension is a symbol of `Sizes.by_name` or a number."""

RESULT_ARRAYS: ArrayTypes = {
    "tokens": (np.int32, ("R",)),
    "logprobs": (np.float32, ("R",)),
    "top_tokens": (np.int32, ("R", str(MAX_LOGPROBS))),
    "top_logprobs": (np.float32, ("R", str(MAX_LOGPROBS))),
}
"""What a step returns."""

ALIGNMENT = 256
"""Of every address that TensorRT is given."""
ITEM_BYTES = 4
"""Of both dtypes."""


class Sizes(NamedTuple):
    """What the shapes of a step's arrays depend on: tokens, sequences, page-table columns, rows of logits."""

    tokens: int
    sequences: int
    columns: int
    rows: int

    def by_name(self) -> dict[str, int]:
        """As the graph file names them."""
        return {"T": self.tokens, "B": self.sequences, "B+1": self.sequences + 1, "P": self.columns, "R": self.rows}


@dataclass(frozen=True)
class Block:
    """Arrays packed behind one another: offset, dtype and shape of each, and the bytes of all."""

    arrays: dict[str, tuple[int, type[np.int32 | np.float32], tuple[int, ...]]]
    size: int

    def views(self, memory: npt.NDArray[np.uint8]) -> dict[str, Array]:
        """The arrays as views of `memory`, which must have `size` bytes at least."""
        found: dict[str, Array] = {}
        for name, (offset, dtype, shape) in self.arrays.items():
            count = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES
            array: Array = memory[offset : offset + count].view(dtype).reshape(shape)  # type: ignore[assignment]
            found[name] = array
        return found

    def addresses(self, start: int) -> dict[str, int]:
        """Address of each array where the block lies at `start`."""
        return {name: start + offset for name, (offset, _, _) in self.arrays.items()}


def pack(arrays: ArrayTypes, sizes: Mapping[str, int]) -> Block:
    """Lay out arrays for the sizes of their symbols."""
    found: dict[str, tuple[int, type[np.int32 | np.float32], tuple[int, ...]]] = {}
    end = 0
    for name, (dtype, dims) in arrays.items():
        shape = tuple(sizes[dim] if dim in sizes else int(dim) for dim in dims)
        found[name] = (end, dtype, shape)
        size = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return Block(found, end)


def page_table_columns(limits: Limits) -> int:
    """Pages of the longest sequence."""
    return -(-limits.max_context // PAGE_TOKENS)


def page_table_width(pages: int, most: int) -> int:
    """Columns that a page table of `pages` columns gets: a power of two from 64 on, at most `most`.

    A width of its own for every length would give every length a CUDA graph of its own, and the longest possible table
    would be copied for every short sequence. So a growing sequence changes its graph at 4,096, 8,192, … tokens only.
    """
    width = 64
    while width < pages:
        width *= 2
    return min(width, most)


def largest_sizes(limits: Limits, columns: int) -> Sizes:
    """The sizes that staging memory must hold, over both phases."""
    tokens = max(limits.prefill_chunk, limits.decode_tokens)
    return Sizes(tokens, limits.max_batch, columns, max(limits.logits_rows, limits.decode_tokens))
