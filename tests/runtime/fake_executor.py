"""An executor without a model, for tests of what is above it, and what it must answer.

Its next token is a hash of everything that a real one would attend to, read back through the page table and the ring
slot it was given: a wrong page, slot, snapshot or token changes every token after it. K of a full layer stands for a
token and its position; K of a sliding layer, as in a real model, also for what the full layers saw there. States start
as poison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MAX_LOGPROBS, PAGE_TOKENS
from flint_runtime.config import ModelConfig
from flint_runtime.engine import Engine
from flint_runtime.executors.base import MAX_IN_FLIGHT, NO_TOKEN, Executor, Pending, StepResult
from flint_runtime.executors.step import Pools, Step, StepError, check_step
from flint_runtime.manifest import Limits, Phase, ring_tokens
from flint_runtime.request import EngineRequest
from tests.manifests import manifest
from tests.shapes import NANO

U64 = npt.NDArray[np.uint64]
POISON, NAN = np.uint64(0xDEADBEEF12345678), np.uint64(0xFFFFFFFFFFFFFFFF)

FAKE = NANO.model_copy(update={"vocab_size": 64})
"""Window 33, ring 48, both kinds of layers."""


def mix(x: U64) -> U64:
    """SplitMix64's finaliser: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def page_values(tokens: Sequence[int], start: int, nan_token: int | None) -> U64:
    """What full layers keep of tokens from position `start` on."""
    ids = np.asarray(tokens, np.uint64)
    values = mix(ids * np.uint64(0x9E3779B97F4A7C15) + np.arange(start, start + len(ids), dtype=np.uint64))
    return np.where(ids == nan_token, NAN, values) if nan_token is not None else values


def read(values: U64, first: int) -> U64:
    """What a query reads of the values at positions from `first` on: one more than the last one for every query."""
    weights = np.arange(first, first + len(values), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return np.cumsum(values * weights, dtype=np.uint64)


def logits_of(state: U64, vocabulary: int) -> npt.NDArray[np.float64]:
    """Of one state, [1] -> [V] from 0 to 1."""
    return mix(state + np.arange(1, vocabulary + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) / 2.0**64


def draw(
    logits: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    seen: npt.NDArray[np.bool_],
    *,
    temperature: float,
    repetition: float,
    presence: float,
    frequency: float,
    seed: tuple[int, int],
    index: int,
    bias: npt.NDArray[np.float64] | None = None,
    mask: npt.NDArray[np.bool_] | None = None,
) -> int:
    """A token, from everything that may matter. Not a real sampler's formulas, but as sensitive."""
    scores = logits + (0 if bias is None else bias)
    scores = scores - presence * (counts > 0) - frequency * counts - (repetition - 1) * (seen | (counts > 0))
    if temperature:
        word = (seed[0] & 0xFFFFFFFF) << 32 | seed[1] & 0xFFFFFFFF
        state = mix(np.array([word], np.uint64) + np.uint64(index))
        scores = scores + temperature * logits_of(state, len(logits))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    best = int(scores.argmax())
    return best if np.isfinite(scores[best]) else NO_TOKEN


class FakePending(Pending):
    """Its result counts as unread until it is asked for."""

    def __init__(self, executor: FakeExecutor, result: StepResult) -> None:
        self._executor, self._result = executor, result

    def done(self) -> bool:
        """Never before it is read: the host must not wait for it."""
        return self not in self._executor.unread

    def result(self) -> StepResult:
        """Only in order."""
        if self in self._executor.unread:
            assert self._executor.unread.pop(0) is self
        return self._result


class FakeExecutor(Executor):
    """See above. `steps` are those that were run; `copies` the pairs of slots that were copied."""

    def __init__(
        self,
        limits: Limits,
        config: ModelConfig = FAKE,
        *,
        memory_bytes: int | None = None,
        nan_token: int | None = None,
    ) -> None:
        """
        Args:
            nan_token: K and V of this token, and all logits after it, are not finite.
        """
        self.engine = Engine(Path("fake"), manifest(model=config, limits=limits))
        self.nan_token = nan_token
        self.unread: list[FakePending] = []
        self.steps: list[tuple[Phase, Step]] = []
        self.copies: list[tuple[int, int]] = []
        self._memory_bytes = memory_bytes
        self.ring = ring_tokens(config.sliding_window)

    @classmethod
    def open(cls, directory: Path) -> FakeExecutor:
        """Never called: it is made by its constructor."""
        raise AssertionError(f"a fake executor does not open {directory}")

    def close(self) -> None:
        """Nothing to free."""

    def memory_available(self) -> int | None:
        """As given."""
        return self._memory_bytes

    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """See `Executor.allocate`."""
        vocabulary = self.config.vocab_size
        self._pools = Pools(pages, slots, sample_slots)
        self.pages = np.full((pages, PAGE_TOKENS), POISON)
        self.rings = np.full((slots, self.ring), POISON)
        self.counts = np.zeros((sample_slots, vocabulary), np.int64)
        self.seen = np.zeros((sample_slots, vocabulary), bool)
        self.bias = np.full((sample_slots, vocabulary), np.nan)
        self.masks = np.zeros((sample_slots, vocabulary), bool)
        self.last_tokens = np.zeros(sample_slots, np.int64)

    @property
    def pools(self) -> Pools:
        """Sizes that were allocated."""
        return self._pools

    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """See `Executor.begin_sequence`."""
        self.counts[sample_slot] = np.bincount(np.asarray(generated, int), minlength=self.config.vocab_size)
        self.seen[sample_slot] = False
        self.seen[sample_slot, list(prompt)] = True
        self.bias[sample_slot] = 0
        self.masks[sample_slot] = True

    def set_logit_bias(self, sample_slot: int, bias: Mapping[int, float]) -> None:
        """See `Executor.set_logit_bias`."""
        self.bias[sample_slot] = 0
        self.bias[sample_slot, list(bias)] = list(bias.values())

    def set_token_mask(self, sample_slot: int, mask: npt.NDArray[np.int32]) -> None:
        """See `Executor.set_token_mask`."""
        self.masks[sample_slot] = unpack_mask(mask)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Executor.copy_slots`."""
        assert len(set(targets)) == len(targets) and not set(sources) & set(targets)
        self.rings[list(targets)] = self.rings[list(sources)]
        self.copies += zip(sources, targets, strict=True)

    def run(self, phase: Phase, step: Step, *, logits: bool | Sequence[int] = False) -> StepResult:
        """See `Executor.run`."""
        return self.submit(phase, step, logits=logits).result()

    def submit(self, phase: Phase, step: Step, *, logits: bool | Sequence[int] = False) -> Pending:
        """See `Executor.submit`."""
        if len(self.unread) >= MAX_IN_FLIGHT:
            raise StepError("too many steps are unread")
        check_step(step, phase, self.config, self.limits, self._pools)
        self.steps.append((phase, step))
        rows = range(len(step.logits_rows)) if logits is True else logits or ()
        pending = FakePending(self, self._run(phase, step, rows))
        self.unread.append(pending)
        return pending

    def discard(self) -> None:
        """See `Executor.discard`."""
        self.unread = []

    def _run(self, phase: Phase, step: Step, logits_rows: Sequence[int]) -> StepResult:
        states = np.zeros(len(step.token_ids), np.uint64)
        finite = np.ones(len(step.token_ids), bool)
        for b, length in enumerate(step.seq_lens.tolist()):
            first, last = step.query_start[b : b + 2].tolist()
            if first < last:
                given = step.token_ids[first:last].tolist()
                tokens = [t if t >= 0 else int(self.last_tokens[-1 - t]) for t in given]
                pages, slot = step.page_table[b], int(step.ring_slot[b])
                states[first:last], finite[first:last] = self._attend(phase, tokens, length, pages, slot)
        rows = len(step.logits_rows)
        result = StepResult(
            np.zeros(rows, np.int32),
            np.zeros(rows, np.float32),
            np.zeros((rows, MAX_LOGPROBS), np.int32),
            np.zeros((rows, MAX_LOGPROBS), np.float32),
            np.zeros((len(logits_rows), self.config.vocab_size), np.float32) if logits_rows else None,
        )
        for row, token_row in enumerate(step.logits_rows.tolist()):
            logits = logits_of(states[token_row : token_row + 1], self.config.vocab_size)
            token = self._draw(step, row, logits) if finite[token_row] else NO_TOKEN
            best = np.argsort(-logits, kind="stable")[:MAX_LOGPROBS]
            result.tokens[row], result.logprobs[row] = token, logits[token] if token >= 0 else np.nan
            result.top_tokens[row], result.top_logprobs[row] = best, logits[best]
            if row in logits_rows:
                assert result.logits is not None
                result.logits[logits_rows.index(row)] = logits
        return result

    def _attend(
        self, phase: Phase, tokens: list[int], length: int, pages: npt.NDArray[np.int32], slot: int
    ) -> tuple[U64, npt.NDArray[np.bool_]]:
        """Store a sequence's new tokens, and the states behind each of them."""
        start, window = length - len(tokens), self.config.sliding_window
        new = page_values(tokens, start, self.nan_token)
        positions = np.arange(start, length)
        full = np.zeros(length, np.uint64)
        finite = np.ones(len(tokens), bool)
        if self.config.full_layers:
            self.pages[pages[positions // PAGE_TOKENS], positions % PAGE_TOKENS] = new
            history = self.pages[pages[: -(-length // PAGE_TOKENS)]].reshape(-1)[:length]
            full = read(history, 0)
            finite = ~np.logical_or.accumulate(history == NAN)[start:]
        keys = np.where(finite, mix(full[start:] + new), NAN)
        if not self.config.sliding_layers:
            return mix(full[start:]), finite
        ring = self.rings[slot]
        oldest = max(0, start - window + 1)
        if phase == "decode":  # Stores first, then reads the ring only.
            ring[positions % self.ring] = keys
            visible = ring[np.arange(oldest, length) % self.ring]
        else:
            visible = np.concatenate([ring[np.arange(oldest, start) % self.ring], keys])
            kept = positions[-self.ring :]
            ring[kept % self.ring] = keys[-len(kept) :]
        return mix(full[start:] ^ mix(_windows(visible, oldest, start, window))), finite

    def _draw(self, step: Step, row: int, logits: npt.NDArray[np.float64]) -> int:
        if step.forced_token[row] >= 0:
            return int(step.forced_token[row])
        slot, flags = int(step.sample_slot[row]), int(step.sample_flags[row])
        none = np.zeros(len(logits), np.int64)
        token = draw(
            logits,
            self.counts[slot] if slot >= 0 else none,
            self.seen[slot] if slot >= 0 else none.astype(bool),
            temperature=float(step.temperature[row]),
            repetition=float(step.repetition_penalty[row]),
            presence=float(step.presence_penalty[row]),
            frequency=float(step.frequency_penalty[row]),
            seed=(int(step.seed[row, 0]), int(step.seed[row, 1])),
            index=int(step.draw_index[row]),
            bias=self.bias[slot] if flags & 1 else None,
            mask=self.masks[slot] if flags & 2 else None,
        )
        if slot >= 0 and token >= 0:
            self.counts[slot, token] += 1
            self.last_tokens[slot] = token
        return token


def _windows(values: U64, first: int, start: int, window: int) -> U64:
    """What the queries from `start` on read of `values`, which stand at positions from `first` on."""
    sums = np.concatenate([np.zeros(1, np.uint64), read(values, first)])
    ends = np.arange(start + 1, first + len(values) + 1)
    return sums[ends - first] - sums[np.maximum(ends - window, first) - first]


def unpack_mask(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[V / 32] words -> [V]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)


def expected_tokens(
    request: EngineRequest, config: ModelConfig = FAKE, *, masks: Iterable[npt.NDArray[np.int32]] | None = None
) -> list[int]:
    """What the request must generate alone, from its tokens only: without pages, rings or batches.

    Args:
        masks: of its grammar, for every token.
    """
    params, prompt = request.params, request.prompt
    tokens, vocabulary = list(prompt), config.vocab_size
    seen = np.zeros(vocabulary, bool)
    seen[prompt] = True
    counts = np.zeros(vocabulary, np.int64)
    each_mask = iter(masks) if masks is not None else None
    row = params.row(0, 0)
    for index in range(request.max_tokens):
        bias = np.zeros(vocabulary)
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
        if index < params.min_tokens:
            bias[list(request.stop_token_ids | request.eos_token_ids)] = -np.inf
        values, last = page_values(tokens, 0, None), len(tokens) - 1
        full = read(values, 0) if config.full_layers else np.zeros(len(tokens), np.uint64)
        state = full[last:]
        if config.sliding_layers:
            oldest = max(0, last - config.sliding_window + 1)
            keys = mix(full + values)[oldest:]
            state = state ^ mix(_windows(keys, oldest, last, config.sliding_window))
        token = draw(
            logits_of(mix(state), vocabulary),
            counts,
            seen,
            temperature=np.float32(row.temperature),
            repetition=float(np.float32(row.repetition_penalty)),
            presence=float(np.float32(row.presence_penalty)),
            frequency=float(np.float32(row.frequency_penalty)),
            seed=row.seed,
            index=index,
            bias=bias,
            mask=unpack_mask(next(each_mask)) if each_mask else None,
        )
        tokens.append(token)
        counts[token] += 1
        if token in request.stop_token_ids:
            break
    return tokens[len(prompt) :]
