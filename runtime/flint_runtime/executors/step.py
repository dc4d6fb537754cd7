"""A step: everything the graph is told besides weights and states, and the checks that guard an executor.

Rows are token-packed: sequence b owns rows query_start[b] to query_start[b + 1]. Lengths and positions are in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MASK_TOKENS, PAGE_TOKENS, USE_BIAS, USE_MASK
from flint_runtime.config import ModelConfig
from flint_runtime.errors import FlintError
from flint_runtime.manifest import LOW_LATENCY_TOKENS, Limits, Phase

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

NO_SLOT = -1
"""sample_slot of a row without penalties, bias and mask, whose token is not recorded."""
DRAW = -1
"""forced_token of a row that draws its token."""


def from_slot(slot: int) -> int:
    """The token id that stands for the token last drawn for a sample slot, which the host need not know yet."""
    return -1 - slot


class StepError(FlintError):
    """A step contradicts the engine's limits or itself: a bug of whoever built it."""


@dataclass(frozen=True)
class RowSampling:
    """How to draw the token that follows one row of logits. The defaults are greedy.

    `seed` are the two words of a 64-bit seed; `draw_index` counts the draws of a sequence, so that no two share random
    numbers; `sample_slot` is the sequence's row of the sampling states. With `forced_token` the row returns this token
    and its logprob, and changes no state. `use_bias` and `use_mask` apply the slot's logit_bias and token_mask.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: tuple[int, int] = (0, 0)
    draw_index: int = 0
    sample_slot: int = NO_SLOT
    forced_token: int = DRAW
    use_bias: bool = False
    use_mask: bool = False

    @property
    def sample_flags(self) -> int:
        """The flags as bits."""
        return USE_BIAS * self.use_bias | USE_MASK * self.use_mask


@dataclass(frozen=True)
class SequencePart:
    """What one sequence contributes to a step: its tokens from position `start` on."""

    token_ids: Sequence[int]
    """In the vocabulary, or `from_slot`."""
    start: int
    pages: Sequence[int]
    """Pages of the global pool, in order of the positions they hold; must cover start + len(token_ids)."""
    ring_slot: int
    rows: Sequence[tuple[int, RowSampling]] = ()
    """Tokens (index in token_ids, negative from the end) whose logits are wanted, and how to draw from them."""


@dataclass(frozen=True)
class Step:
    """The arrays of one step, named as the graph inputs they feed; shapes and dtypes in `STEP_ARRAYS`."""

    token_ids: Int32
    positions: Int32
    query_start: Int32
    """Row of each sequence's first token, then the end; rows from query_start[B] on are padding."""
    seq_lens: Int32
    """Tokens of each sequence after this step."""
    page_table: Int32
    """Pages of each sequence; entries behind its last page are never read."""
    ring_slot: Int32
    logits_rows: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    seed: Int32
    draw_index: Int32
    sample_slot: Int32
    forced_token: Int32
    sample_flags: Int32

    def arrays(self) -> dict[str, Int32 | Float32]:
        """Every array by the name of the graph input it feeds."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


STEP_ARRAYS: dict[str, tuple[type[np.int32 | np.float32], tuple[str, ...]]] = {
    "token_ids": (np.int32, ("T",)),
    "positions": (np.int32, ("T",)),
    "query_start": (np.int32, ("B+1",)),
    "seq_lens": (np.int32, ("B",)),
    "page_table": (np.int32, ("B", "P")),
    "ring_slot": (np.int32, ("B",)),
    "logits_rows": (np.int32, ("R",)),
    "temperature": (np.float32, ("R",)),
    "top_k": (np.int32, ("R",)),
    "top_p": (np.float32, ("R",)),
    "min_p": (np.float32, ("R",)),
    "repetition_penalty": (np.float32, ("R",)),
    "presence_penalty": (np.float32, ("R",)),
    "frequency_penalty": (np.float32, ("R",)),
    "seed": (np.int32, ("R", "2")),
    "draw_index": (np.int32, ("R",)),
    "sample_slot": (np.int32, ("R",)),
    "forced_token": (np.int32, ("R",)),
    "sample_flags": (np.int32, ("R",)),
}
"""Dtype and shape of a step's arrays; symbols as in `flint_plugins.ops`."""
_SAMPLING_ARRAYS = tuple(name for name, (_, shape) in STEP_ARRAYS.items() if shape[0] == "R" and name != "logits_rows")
"""Those that RowSampling has attributes for."""


def build_step(parts: Sequence[SequencePart], table_width: int | None = None) -> Step:
    """Pack what several sequences contribute into one step.

    Args:
        parts: one per sequence, in the order of their rows.
        table_width: columns of the page table; the longest list of pages if None.
    """
    starts = np.cumsum([0, *(len(p.token_ids) for p in parts)])
    width = max(1, *(len(p.pages) for p in parts)) if table_width is None else table_width
    page_table = np.zeros((len(parts), width), np.int32)
    for table_row, part in zip(page_table, parts, strict=True):
        table_row[: len(part.pages)] = part.pages
    rows, sampling = [], []
    for first, part in zip(starts, parts, strict=False):
        for index, how in part.rows:
            rows.append(first + range(len(part.token_ids))[index])
            sampling.append(how)
    draws: dict[str, Any] = {}
    for name in _SAMPLING_ARRAYS:
        values = np.array([getattr(how, name) for how in sampling])
        if name == "seed":  # words may be given signed or unsigned: keep their bits
            draws[name] = (values.astype(np.int64).reshape(-1, 2) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        else:
            draws[name] = values.astype(STEP_ARRAYS[name][0])
    return Step(
        token_ids=np.array([t for p in parts for t in p.token_ids], np.int32),
        positions=np.array([p.start + i for p in parts for i in range(len(p.token_ids))], np.int32),
        query_start=starts.astype(np.int32),
        seq_lens=np.array([p.start + len(p.token_ids) for p in parts], np.int32),
        page_table=page_table,
        ring_slot=np.array([p.ring_slot for p in parts], np.int32),
        logits_rows=np.array(rows, np.int32),
        **draws,
    )


@dataclass(frozen=True)
class Pools:
    """Sizes of an executor's states."""

    pages: int
    """Pages of 64 tokens in every full layer."""
    slots: int
    """Rings in every sliding layer."""
    sample_slots: int
    """Rows of the sampling states."""


@dataclass(frozen=True)
class SamplingState:
    """What Sample keeps of every sample slot: dtype and shape of one row, and the value that it starts from."""

    dtype: type[np.int32 | np.float32]
    shape: tuple[int, ...]
    initial: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def sampling_states(vocab_size: int) -> dict[str, SamplingState]:
    """The states with a row for every sample slot, by graph input: no counts, no token, no bias, all tokens allowed."""
    return {
        "token_counts": SamplingState(np.int32, (vocab_size,), 0),
        "last_tokens": SamplingState(np.int32, (), -1),
        "logit_bias": SamplingState(np.float32, (vocab_size,), 0),
        "token_mask": SamplingState(np.int32, (vocab_size // MASK_TOKENS,), -1),
    }


def check_step(step: Step, phase: Phase, config: ModelConfig, limits: Limits, pools: Pools) -> None:
    """Raise StepError where a step is malformed, exceeds the engine's limits or leaves its pools."""
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in STEP_ARRAYS.items():
        array = getattr(step, name)
        if array.dtype != dtype or array.ndim != len(shape):
            raise StepError(f"{name} must be {dtype.__name__} {list(shape)}, found {array.dtype} {list(array.shape)}")
        for dim, size in zip(shape, array.shape, strict=True):
            if sizes.setdefault(dim, 2 if dim == "2" else size) != size:
                raise StepError(f"{name} has {dim} = {size}, expected {sizes[dim]}")
    tokens, batch, rows = sizes["T"], sizes["B"], sizes["R"]
    if sizes["B+1"] != batch + 1 or not tokens or not batch or not rows:
        raise StepError(
            f"a step needs a token, a sequence, a row of logits and B + 1 entries of query_start, found T = {tokens}, "
            f"B = {batch}, R = {rows}, B + 1 = {sizes['B+1']}"
        )
    decode = phase == "decode"
    most_rows = limits.decode_tokens if decode else limits.logits_rows
    for what, found, most in (
        ("tokens", tokens, limits.decode_tokens if decode else limits.prefill_chunk),
        ("sequences", batch, limits.max_batch),
        ("rows of logits", rows, most_rows),
    ):
        if found > most:
            raise StepError(f"a {phase} step of this engine takes at most {most} {what}, found {found}")
    query_start, seq_lens = step.query_start.astype(np.int64), step.seq_lens.astype(np.int64)
    new = np.diff(query_start)
    if query_start[0] != 0 or (new < 0).any() or query_start[-1] > tokens:
        raise StepError(f"query_start must rise from 0 to at most {tokens}, found {query_start.tolist()}")
    if decode and (new > LOW_LATENCY_TOKENS).any():
        raise StepError(f"a decode step takes at most {LOW_LATENCY_TOKENS} tokens of a sequence, found {new.max()}")
    _range("seq_lens", step.seq_lens, 0, limits.max_context + 1)
    if (seq_lens < new).any():
        raise StepError(f"seq_lens {seq_lens.tolist()} must include the new tokens {new.tolist()}")
    used = query_start[-1]
    expected = np.concatenate([np.arange(n - k, n) for n, k in zip(seq_lens, new, strict=True)])
    if not np.array_equal(step.positions[:used], expected):
        raise StepError("positions must be those of each sequence's last new tokens, in order")
    _range("token_ids", step.token_ids, -pools.sample_slots, config.vocab_size)
    _range("logits_rows", step.logits_rows, 0, tokens)
    _range("sample_slot", step.sample_slot, NO_SLOT, pools.sample_slots)
    _range("forced_token", step.forced_token, DRAW, config.vocab_size)
    _range("sample_flags", step.sample_flags, 0, (USE_BIAS | USE_MASK) + 1)
    if ((step.sample_flags != 0) & (step.sample_slot == NO_SLOT)).any():
        raise StepError("a row with a bias or a mask needs a sample_slot, which holds them, found -1")
    active = new > 0
    if config.sliding_layers:
        _range("ring_slot", step.ring_slot[active], 0, pools.slots)
        if len(set(step.ring_slot[active].tolist())) != active.sum():
            raise StepError(f"two sequences share a ring slot: {step.ring_slot.tolist()}")
    if config.full_layers:
        needed = -(-seq_lens // PAGE_TOKENS)
        if needed[active].max(initial=0) > sizes["P"]:
            raise StepError(f"{needed.max()} pages are needed, the page table has {sizes['P']} columns")
        for b in np.flatnonzero(active):
            _range("page_table", step.page_table[b, : needed[b]], 0, pools.pages)


def _range(name: str, array: Int32, low: int, high: int) -> None:
    if array.size and not (low <= array.min() and array.max() < high):
        raise StepError(f"{name} must be from {low} to {high - 1}, found {array.min()} to {array.max()}")
