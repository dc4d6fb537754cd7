"""The engine core: runs every request over one executor, a step at a time.

Step n + 1 is scheduled, built and submitted while the device runs step n; only then are step n's tokens read. A stream
whose last token is not read yet takes it from its slot on the device. So the end of a stream at a stop token is seen a
step late: the token that was drawn behind it is dropped. Streams whose next step depends on their last token (a
grammar, speculation) sit out the step that is submitted before it is read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from flint_runtime import arguments
from flint_runtime.errors import UsageError
from flint_runtime.executors.base import NO_TOKEN, Executor, Pending, StepResult
from flint_runtime.executors.step import DRAW, NO_SLOT, Float32, RowSampling, SequencePart, build_step, from_slot
from flint_runtime.kv_cache import KVCacheManager, choose_kv_cache
from flint_runtime.request import CoreOutput, EngineRequest, FinishReason, TokenOutput
from flint_runtime.scheduler import ScheduledStep, Scheduler
from flint_runtime.sequence import Sequence, Status
from flint_runtime.token_logprobs import token_output

_NOTHING: list[int] = []
_NOT_FINITE = (
    "The model's logits are not finite: the weights are damaged, or it is a bug of ours. Check the engine with: "
    "run-engine verify"
)
_NOTHING_ALLOWED = (
    "No token could be drawn: the grammar, allowed_token_ids, bad_words, logit_bias and min_tokens together forbid "
    "every token, or the model's logits are not finite."
)


@dataclass(frozen=True)
class CoreConfig:
    """What a core may use. Lengths are in tokens."""

    max_num_seqs: int | None = None
    """Requests that run at once; None for the engine's batch."""
    max_model_len: int | None = None
    """Prompt and answer of one request; None for the engine's context, or less where its memory does not fit."""
    gpu_memory_utilization: float = 0.9
    """Part of the memory which is free once the weights are loaded that the KV cache takes."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache; goes before gpu_memory_utilization."""
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    """Most tokens proposed by prompt lookup per step and request; 0 for none."""
    prefill_target_seconds: float = 0.035
    """How long a step of prompts may take while streams are running: with the decode step that follows, no stream
    stalls for 60 ms."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                self._set(name, arguments.integer(name, getattr(self, name), 1, 2**63 - 1))
        for name, high in (("gpu_memory_utilization", 1.0), ("prefill_target_seconds", math.inf)):
            self._set(name, arguments.number(name, getattr(self, name), 0.0, high, open_low=True))
        self._set("enable_prefix_caching", arguments.flag("enable_prefix_caching", self.enable_prefix_caching))
        proposed = arguments.integer("num_speculative_tokens", self.num_speculative_tokens, 0, 2**31 - 1)
        self._set("num_speculative_tokens", proposed)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class CoreStats:
    """Gauges, and counters since the start."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_cached: int
    pages_free: int
    slots: int
    slots_used: int
    snapshots: int
    snapshots_used: int
    prefix_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int
    """Those that were found."""
    prompt_tokens_computed: int
    """Tokens of prefill steps, those that were computed again after a preemption included."""
    generated_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    """Of proposed_tokens, by speculation."""
    preemptions: int
    prefill_steps: int
    decode_steps: int
    host_seconds: float
    """Time in `step` that was not spent waiting for the device."""


@dataclass(slots=True)
class _InFlight:
    """A submitted step."""

    step: ScheduledStep
    rows: list[int]
    """First row of logits of every sequence."""
    logits_rows: list[int]
    """Rows whose logits come back."""
    pending: Pending
    submitted: float
    done: float | None
    """When it was seen done."""


class EngineCore:
    """Runs requests. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, executor: Executor, config: CoreConfig | None = None) -> None:
        """Size the KV cache and allocate it.

        Raises:
            UsageError: a limit exceeds the engine's.
            ResourceError: the KV cache does not fit.
        """
        config = config or CoreConfig()
        available = config.kv_cache_memory_bytes
        if available is None:
            free = executor.memory_available()
            available = None if free is None else int(free * config.gpu_memory_utilization)
        self.kv_cache = choose_kv_cache(
            executor.config,
            executor.limits,
            available,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        sizes = self.kv_cache
        executor.allocate(sizes.num_pages, sizes.num_slots, sizes.max_num_seqs)
        self._executor = executor
        self._kv = KVCacheManager(sizes)
        self._scheduler = Scheduler(
            self._kv,
            executor.limits,
            target_seconds=config.prefill_target_seconds,
            num_speculative_tokens=config.num_speculative_tokens,
        )
        self._speculative = config.num_speculative_tokens > 0
        self._sequences: dict[str, Sequence] = {}
        self._flights: deque[_InFlight] = deque()
        self._last_done = 0.0
        self._number = 0
        self._prompt_tokens_computed = self._generated_tokens = 0
        self._proposed_tokens = self._accepted_tokens = 0
        self._steps = {"prefill": 0, "decode": 0}
        self._host_seconds = 0.0

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.kv_cache.max_model_len

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self._executor.config.vocab_size

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            UsageError: it can never be served; the message names the limit.
        """
        prompt, most, vocabulary = request.prompt, self.max_model_len, self.vocab_size
        if request.request_id in self._sequences:
            raise UsageError(f"Request id {request.request_id!r} is in use; choose another.")
        if not prompt:
            raise UsageError("The prompt is empty; a generation needs at least one token to start from.")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise UsageError(
                f"The prompt has token ids from {min(prompt)} to {max(prompt)}, some outside the vocabulary of "
                f"{vocabulary}. Encode it with this engine's tokenizer."
            )
        outside = [token for token in request.params.logit_bias if not 0 <= token < vocabulary]
        if outside:
            raise UsageError(
                f"logit_bias has token ids {outside[:5]} outside the vocabulary of {vocabulary}. Leave them out."
            )
        if request.max_tokens < 1 or len(prompt) + request.max_tokens > most:
            raise UsageError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {request.max_tokens}: together they must be at "
                f"most {most} (max_model_len), and max_tokens at least 1. Shorten the prompt or lower max_tokens."
            )
        sequence = Sequence(request, self._number, speculative=self._speculative)
        self._number += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request; there is no further output for it. An unknown id, as of one that just ended, is ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.finish(sequence)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._flights or self._scheduler.running or self._scheduler.waiting)

    def step(self) -> list[CoreOutput]:
        """Submit the next step, then read the one before: what it brought. Often empty at first.

        Raises:
            FlintError: the executor failed; the core is of no use afterwards.
        """
        begin = time.perf_counter()
        flights = self._flights
        if flights and flights[0].done is None and flights[0].pending.done():
            flights[0].done = begin
        scheduled = self._scheduler.schedule()
        if scheduled is not None:
            self._submit(scheduled)
        elif not flights:
            assert not self.has_work(), "requests are left, but nothing can run: a bug"
            return []
        if len(flights) == 1 and scheduled is not None:
            self._host_seconds += time.perf_counter() - begin
            return []
        flight = flights.popleft()
        waited = time.perf_counter()
        result = flight.pending.result()
        now = time.perf_counter()
        done = flight.done or now
        # The device starts a step when it is submitted and the one before is done.
        self._scheduler.record(flight.step, done - max(flight.submitted, self._last_done))
        self._last_done = done
        outputs = self._read(flight, result)
        self._host_seconds += time.perf_counter() - begin - (now - waited)
        return outputs

    def stats(self) -> CoreStats:
        """Gauges and counters."""
        gauges, scheduler = self._kv.gauges(), self._scheduler
        return CoreStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=gauges.pages,
            pages_used=gauges.pages_used,
            pages_cached=gauges.pages_cached,
            pages_free=gauges.pages_free,
            slots=gauges.slots,
            slots_used=gauges.slots_used,
            snapshots=gauges.snapshots,
            snapshots_used=gauges.snapshots_used,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens_computed=self._prompt_tokens_computed,
            generated_tokens=self._generated_tokens,
            proposed_tokens=self._proposed_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=scheduler.preemptions,
            prefill_steps=self._steps["prefill"],
            decode_steps=self._steps["decode"],
            host_seconds=self._host_seconds,
        )

    # --- Submitting -----------------------------------------------------------------------------------------------

    def _submit(self, step: ScheduledStep) -> None:
        for sources, targets in _independent(step.copies):
            self._executor.copy_slots(sources, targets)
        for sequence in step.admitted:
            self._begin(sequence)
        parts, rows = self._decode_parts(step) if step.phase == "decode" else self._prefill_parts(step)
        built = build_step(parts, self._kv.page_table([sequence.table for sequence in step.sequences]))
        submitted = time.perf_counter()
        logits_rows = _logits_rows(step, rows, len(built.logits_rows))
        pending = self._executor.submit(step.phase, built, logits=logits_rows)
        done = time.perf_counter() if pending.done() else None
        self._flights.append(_InFlight(step, rows, logits_rows, pending, submitted, done))
        self._steps[step.phase] += 1

    def _begin(self, sequence: Sequence) -> None:
        """Prepare the sampling state of a sequence that got a place."""
        if sequence.request.scheduled is None:
            sequence.request.scheduled = time.monotonic()
        slot, count = sequence.table.slot, sequence.num_prompt
        if sequence.has_penalties:
            self._executor.begin_sequence(slot, sequence.tokens[:count], sequence.tokens[count:])
        else:  # Nothing depends on the counts: spare the device a long prompt.
            self._executor.begin_sequence(slot, ())
        sequence.banning = sequence.num_generated < sequence.request.params.min_tokens
        sequence.biased = False
        self._set_bias(sequence)
        sequence.prompt_logprobs = [None]

    def _set_bias(self, sequence: Sequence) -> None:
        """The request's logit_bias, and before min_tokens no token that would end it."""
        request = sequence.request
        bias = dict(request.params.logit_bias)
        if sequence.banning:
            bias |= dict.fromkeys(request.stop_token_ids | request.eos_token_ids, float("-inf"))
        if bias or sequence.biased:
            self._executor.set_logit_bias(sequence.table.slot, bias)
        sequence.biased = bool(bias)

    def _draw(self, sequence: Sequence, position: int) -> RowSampling:
        """How to draw the token behind `position`: counted, and stored in the sequence's slot for the next step."""
        index = position + 1 - sequence.num_prompt
        slot = sequence.table.slot
        if sequence.banning and index >= sequence.request.params.min_tokens:
            sequence.banning = False
            self._set_bias(sequence)
        grammar = sequence.request.grammar
        if grammar is not None:
            self._executor.set_token_mask(slot, grammar.mask())
        return RowSampling(*sequence.draw_head, index, slot, DRAW, sequence.biased, grammar is not None)

    def _decode_parts(self, step: ScheduledStep) -> tuple[list[SequencePart], list[int]]:
        parts = []
        for sequence, start in zip(step.sequences, step.starts, strict=True):
            table, tokens = sequence.table, sequence.tokens
            token = tokens[start] if start < len(tokens) else from_slot(table.slot)
            rows = ((0, self._draw(sequence, start)),)
            parts.append(SequencePart((token,), start, table.pages, table.slot, rows))
        if not step.proposals:
            return parts, list(range(len(parts)))
        first_rows, row = [], 0
        for index, (sequence, start, count) in enumerate(zip(step.sequences, step.starts, step.counts, strict=True)):
            first_rows.append(row)
            row += count
            if count > 1:
                # Nothing is counted or stored: which of these tokens stay is not known yet.
                first = start + 1 - sequence.num_prompt
                draws = [RowSampling(*sequence.draw_head, first + i, NO_SLOT) for i in range(count)]
                new = (sequence.tokens[start], *step.proposals[index])
                table = sequence.table
                parts[index] = SequencePart(new, start, table.pages, table.slot, list(enumerate(draws)))
        return parts, first_rows

    def _prefill_parts(self, step: ScheduledStep) -> tuple[list[SequencePart], list[int]]:
        parts, first_rows, total = [], [], 0
        rows: list[tuple[int, RowSampling]] = []
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            table, tokens, end = sequence.table, sequence.tokens, start + count
            self._prompt_tokens_computed += count
            rows = []
            if sequence.wants_prompt_logprobs:
                followed = range(start, min(end, sequence.num_prompt - 1))
                rows += [(p - start, RowSampling(forced_token=tokens[p + 1])) for p in followed]
            if end == len(tokens):
                rows.append((count - 1, self._draw(sequence, end - 1)))
            first_rows.append(total)
            total += len(rows)
            parts.append(SequencePart(tokens[start:end], start, table.pages, table.slot, rows))
        if not total:  # Every step has a row of logits: here a greedy draw that is not used.
            rows.append((-1, RowSampling()))
        return parts, first_rows

    # --- Reading --------------------------------------------------------------------------------------------------

    def _read(self, flight: _InFlight, result: StepResult) -> list[CoreOutput]:
        """Hand a step's tokens to their sequences."""
        step, outputs = flight.step, []
        tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
        read = self._scheduler.step_read
        logits: dict[int, Float32] = {}
        if result.logits is not None:
            logits = dict(zip(flight.logits_rows, result.logits, strict=True))
        for index, sequence in enumerate(step.sequences):
            row, end = flight.rows[index], step.starts[index] + step.counts[index]
            if sequence.wants_prompt_logprobs:
                row = self._read_prompt_logprobs(sequence, step.starts[index], end, row, result)
            if step.phase == "decode" or end == len(sequence.tokens):
                if sequence.status is not Status.FINISHED:
                    proposed = step.proposals.get(index, _NOTHING)
                    outputs.append(self._read_tokens(sequence, proposed, row, tokens, logprobs, result, logits))
                elif tokens[row] == NO_TOKEN:
                    sequence.tainted = (
                        True  # Aborted before this was known: as bad for those who would share its pages.
                    )
            read(sequence)
        return outputs

    def _read_prompt_logprobs(self, sequence: Sequence, start: int, end: int, row: int, result: StepResult) -> int:
        """Take the logprobs of the prompt tokens behind `start` to `end`; the row behind theirs."""
        most = sequence.request.params.prompt_logprobs or 0
        for position in range(start, min(end, sequence.num_prompt - 1)):
            sequence.prompt_logprobs.append(token_output(sequence.tokens[position + 1], row, result, most=most))
            row += 1
        return row

    def _read_tokens(
        self,
        sequence: Sequence,
        proposed: list[int],
        row: int,
        tokens: list[int],
        logprobs: list[float],
        result: StepResult,
        logits: dict[int, Float32],
    ) -> CoreOutput:
        """Append the tokens drawn from `row` on: one, and one more for every proposed token that was drawn, too."""
        request, known = sequence.request, sequence.tokens
        grammar = request.grammar
        new: list[TokenOutput] = []
        reason: FinishReason | None = None
        error = None
        for last in (*proposed, None):
            token = tokens[row]
            if token == NO_TOKEN:
                reason, error = "error", _NOTHING_ALLOWED if sequence.constrained else _NOT_FINITE
                sequence.tainted = True
                break
            known.append(token)
            if sequence.wants_logprobs:
                most, given = sequence.num_top, sequence.logprob_token_ids
                new.append(token_output(token, row, result, most=most, given=given, logits=logits.get(row)))
            else:
                new.append(TokenOutput(token, logprobs[row]))
            if token in request.stop_token_ids:
                reason = "stop"
            elif grammar is not None and not grammar.accept(token):
                reason, error = "error", f"The grammar refuses token {token}, which its own mask allowed: a bug."
            elif len(known) == sequence.max_length:
                reason = "length"
            elif grammar is not None and grammar.finished:
                reason = "stop"
            if reason or token != last:
                break
            row += 1
        self._generated_tokens += len(new)
        if sequence.lookup is not None:
            sequence.lookup.extend([output.token_id for output in new])
            if proposed:
                self._proposed_tokens += len(proposed)
                self._accepted_tokens += max(0, len(new) - 1)
                # K and V of the tokens that were not drawn do not count; they are overwritten.
                sequence.num_tokens = len(known)
                sequence.num_computed = len(known) - 1
        prompt_logprobs = None
        if sequence.wants_prompt_logprobs:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.wants_prompt_logprobs = False
        if reason:
            del self._sequences[request.request_id]
            self._scheduler.finish(sequence)
        return CoreOutput(request.request_id, tuple(new), reason, error, prompt_logprobs, sequence.cached_tokens)


def _logits_rows(step: ScheduledStep, first_rows: list[int], end: int) -> list[int]:
    """Rows of draws whose logits must come back. A prompt's draw is its last row."""
    found: list[int] = []
    if any([sequence.needs_logits for sequence in step.sequences]):
        for sequence, first, last in zip(step.sequences, first_rows, [*first_rows[1:], end], strict=True):
            if sequence.needs_logits and first < last:
                found += range(first, last) if step.phase == "decode" else [last - 1]
    return found


def _independent(copies: list[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Split copies into runs in which no slot is written that another copy of the run reads or writes."""
    sources: list[int] = []
    targets: list[int] = []
    for source, target in copies:
        if source in targets or target in targets or target in sources:
            yield sources, targets
            sources, targets = [], []
        sources.append(source)
        targets.append(target)
    if sources:
        yield sources, targets
