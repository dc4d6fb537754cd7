"""A step: everything the graph is told besides weights and states, and the checks that guard an executor.

Rows are token-packed: sequence b owns rows query_start[b] to query_start[b + 1]. Lengths and positions are in tokens.
The host prepares a step while the GPU runs the one before, so that a step has some tens of microseconds here: it is
packed by one call from Python numbers, and what `build_step` made sound is not looked at again (`StepChecker`).
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MASK_TOKENS, PAGE_TOKENS, USE_BIAS, USE_MASK
from flint_runtime.config import ModelConfig
from flint_runtime.errors import FlintError
from flint_runtime.executors.staging import ITEM_BYTES, Array, ArrayTypes, Block, Sizes, pack
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


class RowSampling(NamedTuple):
    """How to draw the token that follows one row of logits. The defaults are greedy.

    `seed` are the two words of a 64-bit seed, signed or not; `draw_index` counts the draws of a sequence, so that no
    two share random numbers; `sample_slot` is the sequence's row of the sampling states. With `forced_token` the row
    returns this token and its logprob, and changes no state. `use_bias` and `use_mask` apply the slot's logit_bias and
    token_mask.
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


class SequencePart(NamedTuple):
    """What one sequence contributes to a step: its tokens from position `start` on."""

    token_ids: Sequence[int]
    """In the vocabulary, or `from_slot`."""
    start: int
    pages: Sequence[int] | Int32
    """Pages of the global pool, in order of the positions they hold; must cover start + len(token_ids)."""
    ring_slot: int
    rows: Sequence[tuple[int, RowSampling]] = ()
    """Tokens (index in token_ids, negative from the end) whose logits are wanted, and how to draw from them."""


class Packed(NamedTuple):
    """A step as `build_step` packed it, and what is known of it since then. Its arrays cannot be written to."""

    words: Int32
    """Every array but the page table, laid out by `step_block`; floats by their bits."""
    most_new: int
    """Tokens of the sequence that has most."""
    sound: bool
    """Nobody shares a ring slot, every sequence has the pages that its tokens need, every flag its sample slot."""


@dataclass(frozen=True, eq=False)
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
    packed: Packed | None = field(default=None, init=False, repr=False)
    """None where the step was put together by hand."""

    def arrays(self) -> dict[str, Array]:
        """Every array by the name of the graph input it feeds."""
        return {name: getattr(self, name) for name in STEP_ARRAYS}

    def words(self) -> Int32:
        """Every array but the page table, laid out by `step_block`."""
        if self.packed:
            return self.packed.words
        block, _ = step_block(len(self.token_ids), len(self.seq_lens), len(self.logits_rows))
        memory = np.zeros(block.size, np.uint8)
        for name, view in block.views(memory).items():
            view[...] = getattr(self, name)
        return memory.view(np.int32)


STEP_ARRAYS: ArrayTypes = {
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


@functools.lru_cache(maxsize=1024)
def step_block(tokens: int, sequences: int, rows: int) -> tuple[Block, struct.Struct]:
    """Where a step's arrays lie, and what packs their elements.

    The page table is not among them: its width is the executor's choice, and it follows the block.
    """
    arrays = {name: given for name, given in STEP_ARRAYS.items() if name != "page_table"}
    block = pack(arrays, Sizes(tokens, sequences, 0, rows).by_name())
    form = ["="]
    ends = [*(offset for offset, _, _ in block.arrays.values()), block.size][1:]
    for (name, (offset, dtype, shape)), end in zip(block.arrays.items(), ends, strict=True):
        count = math.prod(shape)
        # Seeds may be given signed or unsigned; `build_step` makes them unsigned.
        form.append(f"{count}{'I' if name == 'seed' else 'i' if dtype is np.int32 else 'f'}")
        form.append(f"{end - offset - count * ITEM_BYTES}x")
    return block, struct.Struct("".join(form))


def build_step(parts: Sequence[SequencePart], page_table: Int32 | None = None) -> Step:
    """Pack what several sequences contribute into one step.

    Args:
        parts: one per sequence, in the order of their rows.
        page_table: [B, P], where the caller has the parts' pages as an array already; not to be written to any more.
    Raises:
        StepError: a number does not fit 32 bits.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    query_start, seq_lens, logits_rows = [0], [], []
    draws: list[RowSampling] = []
    first, covered = 0, True
    for new, start, pages, _, rows in parts:
        count = len(new)
        end = start + count
        token_ids += new
        positions += range(start, end)
        seq_lens.append(end)
        if len(pages) * PAGE_TOKENS < end:
            covered = False
        for index, how in rows:
            logits_rows.append(first + range(count)[index])
            draws.append(how)
        first += count
        query_start.append(first)
    most_new = max([len(part.token_ids) for part in parts], default=0)
    ring_slots = [part.ring_slot for part in parts]
    block, packer = step_block(len(token_ids), len(parts), len(draws))
    columns: Iterable[Sequence[Any]] = zip(*draws, strict=True) if draws else itertools.repeat(())
    values: dict[str, Sequence[Any]] = dict(zip(RowSampling._fields, columns, strict=False))
    flags = [0] * len(draws)
    if True in values["use_bias"] or True in values["use_mask"]:
        pairs = zip(values["use_bias"], values["use_mask"], strict=True)
        flags = [USE_BIAS * bias | USE_MASK * mask for bias, mask in pairs]
    seeds = list(itertools.chain.from_iterable(values["seed"]))
    if draws and min(seeds) < 0:
        seeds = [word & 0xFFFFFFFF for word in seeds]
    values |= {
        "seed": seeds,
        "sample_flags": flags,
        "token_ids": token_ids,
        "positions": positions,
        "query_start": query_start,
        "seq_lens": seq_lens,
        "ring_slot": ring_slots,
        "logits_rows": logits_rows,
    }
    try:
        data = packer.pack(*itertools.chain.from_iterable([values[name] for name in block.arrays]))
    except (struct.error, OverflowError) as error:
        raise StepError(f"a number of a step does not fit 32 bits: {error}") from None
    table = _page_table(parts) if page_table is None else page_table
    table.setflags(write=False)
    step = Step(page_table=table, **_views(block, data))
    has_slots = NO_SLOT not in values["sample_slot"] or not any(map(_lacks_slot, flags, values["sample_slot"]))
    sound = covered and has_slots and len(set(ring_slots)) == len(ring_slots)
    object.__setattr__(step, "packed", Packed(np.frombuffer(data, np.int32), most_new, sound))
    return step


def _lacks_slot(flags: int, sample_slot: int) -> bool:
    return bool(flags) and sample_slot == NO_SLOT


def _page_table(parts: Sequence[SequencePart]) -> Int32:
    table = np.zeros((len(parts), max([1, *(len(part.pages) for part in parts)])), np.int32)
    for index, part in enumerate(parts):
        table[index, : len(part.pages)] = part.pages
    return table


def _views(block: Block, data: bytes) -> dict[str, Any]:
    """The arrays of a block in `data`, whose bytes cannot be written to; as `Block.views`, but faster."""
    of = {np.int32: np.frombuffer(data, np.int32), np.float32: np.frombuffer(data, np.float32)}
    found: dict[str, Any] = {}
    for name, (offset, dtype, shape) in block.arrays.items():
        first = offset // ITEM_BYTES
        if len(shape) == 1:
            found[name] = of[dtype][first : first + shape[0]]
        else:
            found[name] = of[dtype][first : first + math.prod(shape)].reshape(shape)
    return found


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


class StepChecker:
    """`check_step` for one engine and its pools, in a few microseconds for a step that `build_step` made."""

    def __init__(self, config: ModelConfig, limits: Limits, pools: Pools) -> None:
        self._config, self._limits, self._pools = config, limits, pools
        self._bounds: dict[tuple[Phase, int, int, int], tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] = {}

    def check(self, step: Step, phase: Phase) -> None:
        """Raise StepError like `check_step`."""
        if not self._is_fine(step, phase):
            check_step(step, phase, self._config, self._limits, self._pools)

    def _is_fine(self, step: Step, phase: Phase) -> bool:
        """Whether the step certainly passes `check_step`; what only may pass is left to that.

        Positions, query_start and shapes are right by construction, so what is left are the sizes and bounds.
        """
        packed = step.packed
        if packed is None or not packed.sound or (phase == "decode" and packed.most_new > LOW_LATENCY_TOKENS):
            return False
        key = phase, len(step.token_ids), len(step.seq_lens), len(step.logits_rows)
        bounds = self._bounds.get(key)
        if bounds is None:
            if _size_problem(*key, self._limits):
                return False
            bounds = self._bounds[key] = self._word_bounds(*key[1:])
        low, span = bounds
        # In unsigned numbers, one comparison finds both what is too low and what is too high.
        if (packed.words.view(np.uint32) - low > span).any():
            return False
        return not self._config.full_layers or step.page_table.view(np.uint32).max() < self._pools.pages

    def _word_bounds(
        self, tokens: int, sequences: int, rows: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Least value of every packed word, and by how much it may be exceeded."""
        block, _ = step_block(tokens, sequences, rows)
        low, span = np.zeros(block.size, np.uint8), np.full(block.size, 0xFF, np.uint8)
        lows, spans = block.views(low), block.views(span)
        bounds = _array_bounds(tokens, self._config, self._limits, self._pools)
        if self._config.sliding_layers:
            bounds["ring_slot"] = (0, self._pools.slots)
        for name, (least, end) in bounds.items():
            if least >= end:  # There is no such slot: no value is right.
                least, end = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1
            lows[name][...] = least
            spans[name][...] = end - 1 - least
        return low.view(np.uint32), span.view(np.uint32)


def _size_problem(phase: Phase, tokens: int, sequences: int, rows: int, limits: Limits) -> str | None:
    """What of a step's sizes the engine does not take, or None."""
    decode = phase == "decode"
    if not tokens or not sequences or not rows:
        return f"a step needs a token, a sequence and a row of logits, found T = {tokens}, B = {sequences}, R = {rows}"
    for what, found, most in (
        ("tokens", tokens, limits.decode_tokens if decode else limits.prefill_chunk),
        ("sequences", sequences, limits.max_batch),
        ("rows of logits", rows, limits.decode_tokens if decode else limits.logits_rows),
    ):
        if found > most:
            return f"a {phase} step of this engine takes at most {most} {what}, found {found}"
    return None


def _array_bounds(tokens: int, config: ModelConfig, limits: Limits, pools: Pools) -> dict[str, tuple[int, int]]:
    """Least value, and the one behind the greatest, of the arrays for which they are the same at every element."""
    return {
        "token_ids": (-pools.sample_slots, config.vocab_size),
        "seq_lens": (0, limits.max_context + 1),
        "logits_rows": (0, tokens),
        "sample_slot": (NO_SLOT, pools.sample_slots),
        "forced_token": (DRAW, config.vocab_size),
        "sample_flags": (0, (USE_BIAS | USE_MASK) + 1),
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
    tokens, batch = sizes["T"], sizes["B"]
    if sizes["B+1"] != batch + 1:
        raise StepError(f"query_start must have B + 1 = {batch + 1} entries, found {sizes['B+1']}")
    if problem := _size_problem(phase, tokens, batch, sizes["R"], limits):
        raise StepError(problem)
    query_start, seq_lens = step.query_start.astype(np.int64), step.seq_lens.astype(np.int64)
    new = np.diff(query_start)
    if query_start[0] != 0 or (new < 0).any() or query_start[-1] > tokens:
        raise StepError(f"query_start must rise from 0 to at most {tokens}, found {query_start.tolist()}")
    if phase == "decode" and (new > LOW_LATENCY_TOKENS).any():
        raise StepError(f"a decode step takes at most {LOW_LATENCY_TOKENS} tokens of a sequence, found {new.max()}")
    for name, (low, high) in _array_bounds(tokens, config, limits, pools).items():
        _range(name, getattr(step, name), low, high)
    if ((step.sample_flags != 0) & (step.sample_slot == NO_SLOT)).any():
        raise StepError("a row with a bias or a mask needs a sample_slot, which holds them, found -1")
    if (seq_lens < new).any():
        raise StepError(f"seq_lens {seq_lens.tolist()} must include the new tokens {new.tolist()}")
    used = query_start[-1]
    expected = np.concatenate([np.arange(n - k, n) for n, k in zip(seq_lens, new, strict=True)])
    if not np.array_equal(step.positions[:used], expected):
        raise StepError("positions must be those of each sequence's last new tokens, in order")
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
