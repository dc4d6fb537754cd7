"""The engine core: runs every request over one executor, a step at a time.

Step n + 1 is scheduled, built and submitted while the device runs step n; only then are step n's tokens read. A stream
whose last token is not read yet takes it from its slot on the device. So the end of a stream at a stop token is seen a
step late: the token that was drawn behind it is dropped. Streams whose next step depends on their last token (a
grammar, speculation) sit out the step that is submitted before it is read. In a free part of a grammar (thinking, the
text around calls) only a few tokens change what may follow: there a stream runs ahead, and where one of them was drawn,
what was drawn behind it is dropped, and drawn again. Grammars are parsed in other processes: who waits for one that
takes long sits out more steps, and the others do not wait.

What goes wrong with one request, when it is begun, drawn for or read, ends that request. A step that fails ends those
in it, and whoever else is running is computed again. Whatever cuts a change short, Ctrl-C among it, leaves a mark; then
the books are made anew (`_mend`), so that they are whole whatever was half done.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from flint_runtime import arguments
from flint_runtime.errors import EngineDeadError, FlintError, UsageError
from flint_runtime.executors.base import MAX_IN_FLIGHT, NO_TOKEN, Executor, Pending, StepResult
from flint_runtime.executors.step import DRAW, NO_SLOT, Float32, RowSampling, SequencePart, Step, build_step, from_slot
from flint_runtime.kv_cache import KVCacheManager, choose_kv_cache
from flint_runtime.request import CoreOutput, EngineRequest, FinishReason, Grammar, TokenOutput
from flint_runtime.request_check import check_request
from flint_runtime.scheduler import ScheduledStep, Scheduler
from flint_runtime.sequence import Sequence, Status
from flint_runtime.token_logprobs import token_output

logger = logging.getLogger(__name__)

_NOTHING: list[int] = []
_PARSING_SECONDS = 0.002
"""How long a step waits for what grammars allow next. Most take a tenth of that; joining this step saves them one."""
_IDLE_SECONDS = 0.01
"""The same where there is nothing else to do."""
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
    dropped: set[Sequence] = field(default_factory=set)
    """Sequences whose draws do not count: the token before them changed what their grammar allows."""


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
        self._make_scheduler = partial(
            Scheduler,
            limits=executor.limits,
            target_seconds=config.prefill_target_seconds,
            num_speculative_tokens=config.num_speculative_tokens,
        )
        self._scheduler = self._make_scheduler(self._kv)
        self._speculative = config.num_speculative_tokens > 0
        self._sequences: dict[str, Sequence] = {}
        self._flights: deque[_InFlight] = deque()
        self._parsing: dict[Sequence, float] = {}
        """Sequences whose grammar parses their last token, and until when steps wait for it."""
        self._outputs: list[CoreOutput] = []
        """Made, and not handed out yet."""
        self._torn = False
        """A change is under way; where it stands when nobody is in here, one was cut short."""
        self._reading: Sequence | None = None
        """Its tokens may be ahead of its outputs."""
        self._dead: Exception | None = None
        """Why the executor does not work any more."""
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
            UsageError: it can never be served; the message names what is wrong.
            EngineDeadError: the executor has failed.
        """
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        self._mend()
        if request.request_id in self._sequences:
            raise UsageError(f"Request id {request.request_id!r} is in use; choose another.")
        sequence = Sequence(request, self._number, speculative=self._speculative)
        with self._change():
            self._number += 1
            self._sequences[request.request_id] = sequence
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request; there is no further output for it. An unknown id, as of one that just ended, is ignored."""
        if request_id not in self._sequences and not self._outputs:
            return
        try:
            with self._change():
                self._outputs = [output for output in self._outputs if output.request_id != request_id]
                sequence = self._sequences.get(request_id)
                if sequence is not None:
                    self._end(sequence)
        except Exception as error:  # Who aborts need not know: the request has ended; others hear of a dead engine.
            self._sequences.pop(request_id, None)
            if not isinstance(error, EngineDeadError):
                logger.exception("The abort of request %r failed.", request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._flights or self._scheduler.running or self._scheduler.waiting or self._outputs or self._torn)

    def step(self) -> list[CoreOutput]:
        """Submit the next step, then read the one before: what it brought. Often empty at first.

        A step that the executor refuses or fails ends the requests in it, with finish_reason "error".

        Raises:
            EngineDeadError: the executor does not work any more, and the core is of no use.
        """
        begin = time.perf_counter()
        self._mend()
        self._torn = True
        waited = 0.0
        suspects: list[Sequence] | None = None
        try:
            flights, scheduled = self._flights, None
            if flights and flights[0].done is None:
                suspects = flights[0].step.sequences
                if flights[0].pending.done():
                    flights[0].done = begin
                suspects = None
            self._await_grammars()
            scheduled = self._scheduler.schedule()
            if scheduled is not None:
                suspects = scheduled.sequences
                self._submit(scheduled)
            elif not flights and self._parsing:
                suspects = [next(iter(self._parsing))]
                _grammar(suspects[0]).wait(_IDLE_SECONDS)
            elif not flights:
                assert not (self._scheduler.running or self._scheduler.waiting), "requests are left, but none can run"
            if flights and (scheduled is None or len(flights) == MAX_IN_FLIGHT):
                suspects = flights[0].step.sequences
                waited = self._read_first()
            self._torn = False
        except Exception as error:
            self._fail(suspects, error)
        except BaseException:
            self._mend()
            raise
        self._host_seconds += time.perf_counter() - begin - waited
        return self._hand_out()

    def _hand_out(self) -> list[CoreOutput]:
        """What was made since the last time. From here on it is the caller's, who loses it if interrupted now."""
        outputs, self._outputs = self._outputs, []
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

    # --- When something goes wrong --------------------------------------------------------------------------------

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change to the books; cut short, it is mended at once, or by the next one."""
        self._mend()
        self._torn = True
        try:
            yield
        except BaseException:
            self._mend()
            raise
        self._torn = False

    def _end(self, sequence: Sequence) -> None:
        self._sequences.pop(sequence.request.request_id, None)
        self._parsing.pop(sequence, None)
        self._scheduler.finish(sequence)

    def _end_with(self, sequence: Sequence, error: Exception) -> None:
        """End one request with what went wrong with it; nothing where it has ended. Steps in flight run on."""
        if sequence.status is Status.FINISHED:
            return
        logger.error("Request %r failed.", sequence.request.request_id, exc_info=error)
        self._outputs.append(_failed(sequence, error))
        self._end(sequence)

    def _fail(self, suspects: Iterable[Sequence] | None, error: Exception) -> None:
        """A step failed: end the requests in it, and make the books anew for the others.

        Args:
            suspects: None where no step is to blame. Then those that are running end, or else the first that waits:
                somebody must, or the next step would fail in the same way.
        Raises:
            EngineDeadError: the executor does not work any more.
        """
        self._torn = True
        logger.error("A step failed.", exc_info=error)
        live = self._sequences
        if suspects is None:
            suspects = [s for s in live.values() if s.status is not Status.WAITING] or list(live.values())[:1]
        ended = self._ended()
        for sequence in suspects:
            name = sequence.request.request_id
            if live.get(name) is sequence and name not in ended:
                self._outputs.append(_failed(sequence, error))
        self._mend(error)

    def _mend(self, cause: Exception | None = None) -> None:
        """Make the books anew where a change was cut short: nobody has a place, and whoever lives waits for one.

        What was cached is lost. Sequences are computed again from their tokens, and so give the same ones. Whatever
        cuts this short, it runs again from the start.

        Raises:
            EngineDeadError: the executor does not work any more.
        """
        if not self._torn:
            return
        try:
            if self._dead is None:
                self._executor.discard()
        except Exception as error:
            self._dead = cause or error
        if self._dead is not None:
            name = type(self._dead).__name__
            raise EngineDeadError(f"The executor has failed: {name}: {self._dead}. Restart the engine.") from self._dead
        if self._reading is not None and self._reading.request.request_id not in self._ended():
            self._outputs.append(_failed(self._reading, None))
        ended = self._ended()
        live = {name: sequence for name, sequence in self._sequences.items() if name not in ended}
        kv = KVCacheManager(self.kv_cache)
        scheduler = self._make_scheduler(kv)
        scheduler.go_on_from(self._scheduler)
        for sequence in live.values():
            sequence.restart()
            scheduler.add(sequence)
        self._kv, self._scheduler, self._sequences = kv, scheduler, live
        self._parsing = {sequence: 0.0 for sequence in live.values() if sequence.parsing}
        self._flights, self._reading = deque(), None
        self._torn = False

    def _ended(self) -> set[str]:
        """Requests whose last output was made and is not handed out yet."""
        return {output.request_id for output in self._outputs if output.finish_reason}

    # --- Submitting -----------------------------------------------------------------------------------------------

    def _submit(self, step: ScheduledStep) -> None:
        for sources, targets in _independent(step.copies):
            self._executor.copy_slots(sources, targets)
        for sequence in step.admitted:
            try:
                self._begin(sequence)
            except Exception as error:
                self._end_with(sequence, error)
        parts, rows = self._decode_parts(step) if step.phase == "decode" else self._prefill_parts(step)
        built = self._pack(step, parts)
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
        self._set_sampling_state(sequence)
        sequence.prompt_logprobs = [None]

    def _set_sampling_state(self, sequence: Sequence) -> None:
        """What the sequence's slot holds for its next draw: counts of the tokens known here, the bias, no mask."""
        slot, count = sequence.table.slot, sequence.num_prompt
        if sequence.has_penalties:
            self._executor.begin_sequence(slot, sequence.tokens[:count], sequence.tokens[count:])
        else:  # Nothing depends on the counts: spare the device a long prompt.
            self._executor.begin_sequence(slot, ())
        sequence.banning = sequence.num_generated < sequence.request.params.min_tokens
        sequence.biased, sequence.mask = False, None
        self._set_bias(sequence)

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
        """How to draw the token behind `position`: counted, and stored in the sequence's slot for the next step.

        Where that fails, the request ends, and its place in the step, which is fixed, gets a draw that is not used.
        """
        try:
            return self._try_draw(sequence, position) if sequence.status is not Status.FINISHED else RowSampling()
        except Exception as error:
            self._end_with(sequence, error)
            return RowSampling()

    def _try_draw(self, sequence: Sequence, position: int) -> RowSampling:
        index = position + 1 - sequence.num_prompt
        slot = sequence.table.slot
        if sequence.banning and index >= sequence.request.params.min_tokens:
            sequence.banning = False
            self._set_bias(sequence)
        grammar = sequence.request.grammar
        masked = grammar is not None and self._set_mask(sequence, grammar, position + 1 - len(sequence.tokens))
        return RowSampling(*sequence.draw_head, index, slot, DRAW, sequence.biased, masked)

    def _set_mask(self, sequence: Sequence, grammar: Grammar, ahead: int) -> bool:
        """Give the slot what may be drawn next, unless it has it; whether anything is forbidden."""
        mask = grammar.mask(ahead)
        if mask is not None and mask is not sequence.mask:
            self._executor.set_token_mask(sequence.table.slot, mask)
            # Outside a free part the same array may say something else at the next token.
            sequence.mask = None if grammar.triggers is None else mask
        return mask is not None

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

    def _pack(self, step: ScheduledStep, parts: list[SequencePart]) -> Step:
        """Build the step. A request whose numbers do not fit ends, and the others do not notice."""
        table = self._kv.page_table([sequence.table for sequence in step.sequences])
        try:
            return build_step(parts, table)
        except Exception:
            for index, part in enumerate(parts):
                try:
                    build_step([part])
                except Exception as error:
                    self._end_with(step.sequences[index], error)
                    parts[index] = part._replace(rows=[(row, RowSampling()) for row, _ in part.rows])
            return build_step(parts, table)

    # --- Grammars -------------------------------------------------------------------------------------------------

    def _await_grammars(self) -> None:
        """See what grammars allow next; requests end by it, well or not."""
        for sequence, until in list(self._parsing.items()):
            grammar, name = _grammar(sequence), sequence.request.request_id
            try:
                if not grammar.wait(until - time.perf_counter()):
                    continue
                error, finished = grammar.error, grammar.finished
            except Exception as found:
                self._end_with(sequence, found)
                continue
            if error or finished:
                reason: FinishReason = "error" if error else "stop"
                self._outputs.append(CoreOutput(name, (), reason, error, None, sequence.cached_tokens))
                self._end(sequence)
            sequence.parsing = False
            sequence.update_synchronous()
            self._parsing.pop(sequence, None)

    # --- Reading --------------------------------------------------------------------------------------------------

    def _read_first(self) -> float:
        """Wait for the first step in flight and read it; the seconds that it took to wait."""
        flight = self._flights.popleft()
        waited = time.perf_counter()
        result = flight.pending.result()
        now = time.perf_counter()
        done = flight.done or now
        # The device starts a step when it is submitted and the one before is done.
        self._scheduler.record(flight.step, done - max(flight.submitted, self._last_done))
        self._last_done = done
        self._read(flight, result)
        return now - waited

    def _read(self, flight: _InFlight, result: StepResult) -> None:
        """Hand a step's tokens to their sequences."""
        step, outputs = flight.step, self._outputs
        tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
        read = self._scheduler.step_read
        logits: dict[int, Float32] = {}
        if result.logits is not None:
            logits = dict(zip(flight.logits_rows, result.logits, strict=True))
        for index, sequence in enumerate(step.sequences):
            row, end = flight.rows[index], step.starts[index] + step.counts[index]
            ended = False
            if sequence in flight.dropped:
                # Not finite here is not finite when it is drawn again, which an abort may prevent.
                sequence.tainted = sequence.tainted or tokens[row] == NO_TOKEN
                read(sequence)
                continue
            try:
                if sequence.wants_prompt_logprobs:
                    row = self._read_prompt_logprobs(sequence, step.starts[index], end, row, result)
                if step.phase == "decode" or end == len(sequence.tokens):
                    if sequence.status is not Status.FINISHED:
                        proposed = step.proposals.get(index, _NOTHING)
                        self._reading = sequence
                        output = self._read_tokens(sequence, proposed, row, tokens, logprobs, result, logits)
                        outputs.append(output)
                        self._reading = None
                        ended = output.finish_reason is not None
                    elif tokens[row] == NO_TOKEN:
                        # Aborted before this was known: as bad for those who would share its pages.
                        sequence.tainted = True
            except Exception as error:
                self._end_with(sequence, error)
                self._reading = None
            if ended:
                self._end(sequence)
            read(sequence)

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
        free = None if grammar is None else grammar.triggers
        new: list[TokenOutput] = []
        reason: FinishReason | None = None
        error = None
        for last in (*proposed, None):
            token = tokens[row]
            if token == NO_TOKEN:
                reason, error = "error", _NOTHING_ALLOWED if sequence.constrained else _NOT_FINITE
                if grammar is not None and grammar.error:
                    error = grammar.error
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
        if not reason and grammar is not None:
            if free is not None and token in free:
                self._drop_ahead(sequence)
            sequence.update_synchronous()
            if grammar.triggers is None:
                sequence.parsing = True
                self._parsing[sequence] = time.perf_counter() + _PARSING_SECONDS
        return CoreOutput(request.request_id, tuple(new), reason, error, prompt_logprobs, sequence.cached_tokens)

    def _drop_ahead(self, sequence: Sequence) -> None:
        """A token was read that changes what may follow: drop what a step in flight draws behind it."""
        if sequence.num_tokens == len(sequence.tokens):
            return
        for flight in self._flights:
            if sequence in flight.step.sequences:
                flight.dropped.add(sequence)
        sequence.drop_ahead()
        if sequence.has_penalties and sequence.status is Status.RUNNING:  # The token that is dropped was counted.
            self._set_sampling_state(sequence)


def _grammar(sequence: Sequence) -> Grammar:
    """That of a sequence which has one."""
    assert sequence.request.grammar is not None
    return sequence.request.grammar


def _failed(sequence: Sequence, error: Exception | None) -> CoreOutput:
    """The last output of a request that something else than its end has ended."""
    if error is None:
        message = "The engine was interrupted while it read this request's tokens."
    elif isinstance(error, FlintError):
        message = str(error)
    else:
        message = f"This request failed in the engine, which is a bug of ours: {type(error).__name__}: {error}."
    return CoreOutput(sequence.request.request_id, (), "error", message, None, sequence.cached_tokens)


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
