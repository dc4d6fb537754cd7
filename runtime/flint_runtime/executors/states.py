"""The states of a graph: inputs that steps update in place. What they are is read from the graph file.

A state's first dimension is the number of pages, of ring slots or of sample slots. KV pools are paged or rings; the
sampling states (token counts, last tokens, biases, masks) have a row per sample slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import DType
from flint_runtime.executors.base import PROMPT_FLAG
from flint_runtime.executors.graph_file import GraphFile, GraphTensor
from flint_runtime.executors.step import Float32, Int32, Pools, StepError

_RINGS, _PAGED, _SAMPLING = "slots", "pages", "sample_slots"
_ORDER = (_RINGS, _PAGED, _SAMPLING)
_ALIGNMENT = 256
_BYTES: dict[DType, int] = {"bf16": 2, "f32": 4, "i32": 4, "i8": 1}


@dataclass(frozen=True)
class StateLayout:
    """Where the states lie in one allocation: first the rings, then the paged pools, then the sampling states."""

    offsets: dict[str, int]
    row_bytes: dict[str, int]
    """Of one page or slot of each state."""
    sampling_offset: int
    """First byte behind the KV pools."""
    size: int


class States:
    """The states of an engine's graphs."""

    def __init__(self, files: Iterable[GraphFile]) -> None:
        inputs = {name: given for file in files for name, given in file.inputs.items() if is_state(given)}
        self.inputs = dict(sorted(inputs.items(), key=lambda item: _ORDER.index(str(item[1].shape[0]))))
        """Types and shapes by name: the rings first, the sampling states last."""

    def rings(self) -> list[str]:
        """The KV pools of the sliding layers, all of one shape."""
        return [name for name, given in self.inputs.items() if given.shape[0] == _RINGS]

    def sampling(self) -> list[str]:
        """The sampling states."""
        return [name for name, given in self.inputs.items() if given.shape[0] == _SAMPLING]

    def shape(self, name: str, pools: Pools) -> tuple[int, ...]:
        """A state's shape in pools of these sizes."""
        sizes = pool_sizes(pools)
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.inputs[name].shape)

    def row_bytes(self, name: str) -> int:
        """Bytes of one page or slot of a state."""
        given = self.inputs[name]
        return _BYTES[given.dtype] * math.prod(int(dim) for dim in given.shape[1:])

    def layout(self, pools: Pools) -> StateLayout:
        """Lay the states out for pools of these sizes."""
        offsets: dict[str, int] = {}
        row_bytes = {name: self.row_bytes(name) for name in self.inputs}
        end, sampling_offset = 0, None
        for name in self.inputs:
            if sampling_offset is None and self.inputs[name].shape[0] == _SAMPLING:
                sampling_offset = end
            offsets[name] = end
            size = self.shape(name, pools)[0] * row_bytes[name]
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return StateLayout(offsets, row_bytes, end if sampling_offset is None else sampling_offset, end)


def is_state(given: GraphTensor) -> bool:
    """Whether a graph input is a state."""
    return bool(given.shape) and given.shape[0] in _ORDER


def pool_sizes(pools: Pools) -> dict[str, int]:
    """Sizes of the pools as the graph file names them."""
    return {_PAGED: pools.pages, _RINGS: pools.slots, _SAMPLING: pools.sample_slots}


# --- What callers may set -----------------------------------------------------------------------------------------


def check_sample_slot(sample_slot: int, pools: Pools) -> None:
    """Raise StepError where there is no such slot."""
    if not 0 <= sample_slot < pools.sample_slots:
        raise StepError(f"sample_slot must be from 0 to {pools.sample_slots - 1}, found {sample_slot}")


def check_copies(sources: Sequence[int], targets: Sequence[int], pools: Pools) -> None:
    """Raise StepError unless these are pairs of ring slots."""
    if len(sources) != len(targets):
        raise StepError(f"copy_slots takes as many sources as targets, found {len(sources)} and {len(targets)}")
    wrong = [slot for slot in (*sources, *targets) if not 0 <= slot < pools.slots]
    if wrong:
        raise StepError(f"ring slots must be from 0 to {pools.slots - 1}, found {wrong[0]}")


def count_row(vocab_size: int, prompt: Sequence[int], generated: Sequence[int]) -> Int32:
    """[V] int32: the times each token was generated, plus PROMPT_FLAG where it stands in the prompt.

    Raises:
        StepError: a token is outside the vocabulary.
    """
    in_prompt, drawn = np.asarray(prompt, np.int64), np.asarray(generated, np.int64)
    _check_tokens(vocab_size, in_prompt)
    _check_tokens(vocab_size, drawn)
    row = np.bincount(drawn, minlength=vocab_size).astype(np.int32)
    row[in_prompt] |= PROMPT_FLAG
    return row


def bias_row(vocab_size: int, bias: Mapping[int, float]) -> Float32:
    """[V] float32 of a mapping. Raises StepError where a token is outside the vocabulary."""
    tokens = np.fromiter(bias.keys(), np.int64, len(bias))
    _check_tokens(vocab_size, tokens)
    row = np.zeros(vocab_size, np.float32)
    row[tokens] = np.fromiter(bias.values(), np.float32, len(bias))
    return row


def mask_row(vocab_size: int, mask: npt.NDArray[np.int32 | np.uint32]) -> Int32:
    """A token mask as int32 [V/32]. Raises StepError where it has another shape or type."""
    words = vocab_size // 32
    if mask.shape != (words,) or mask.dtype not in (np.int32, np.uint32):
        raise StepError(f"a token mask must be int32 or uint32 [{words}], found {mask.dtype} {list(mask.shape)}")
    return np.ascontiguousarray(mask).view(np.int32)


def _check_tokens(vocab_size: int, tokens: npt.NDArray[np.int64]) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise StepError(f"token ids must be from 0 to {vocab_size - 1}, found {tokens.min()} to {tokens.max()}")
