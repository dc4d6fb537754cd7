"""The scheduler: which sequences run in the next step, and with which tokens. It knows ids and numbers only.

Iteration-level batching over two kinds of steps. A decode step takes the next token of every running stream; a prefill
step takes chunks of prompts. While streams are running the two alternate, and a prefill step takes only as many tokens
as keep it near a target duration. Whoever came first, among those of the lowest priority value, gets a
place first, and keeps it when memory runs out: then the last running sequence in that order gives its place back and is
computed anew later. Among prompts with a place the first does not take all: it leaves half of a step to those behind
it, so that a short one need not wait for the end of a long one.

A prompt that begins like an earlier one goes on from where that one's sliding state was kept (see `kv_cache`): at the
end of its prompt or answer, or where prompts parted from it often enough to be worth a cut.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.kv_cache import KVCacheManager
from flint_runtime.manifest import LOW_LATENCY_TOKENS, Limits, Phase
from flint_runtime.prefill_budget import PrefillBudget
from flint_runtime.sequence import Sequence, Status

_STEP_TOKENS = 512
"""What one more short step costs, in tokens of a longer one: on an H200 8 to 10 ms, and 512 tokens take 18 ms, 64 take
8. A prompt is cut where it parts from what is cached, so that the sliding state there can be kept, once the tokens that
were computed again for want of it come to that: so the cut costs no more than was lost, whoever comes back or not."""
_SPACING_TOKENS = 8192
"""Of a longer prompt, the state at the end of a chunk is kept where the last one kept is so far back, for prompts that
begin in the same way. It costs no step, but a snapshot as much memory as 1,480 tokens of pages."""


@dataclass(slots=True)
class ScheduledStep:
    """One step: per sequence where its tokens start and how many they are."""

    phase: Phase
    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    proposals: dict[int, list[int]] = field(default_factory=dict)
    """Speculation, by index in `sequences`: the tokens after the first one."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that got a place since the last step, whether or not they run in this one."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Slots to copy before the step, one after the other."""
    work: float = 0.0
    """Of a prefill step: see `PrefillBudget`."""


@dataclass(slots=True)
class _Room:
    """What is left of a prefill step."""

    tokens: int
    rows: int
    """Of logits."""
    work: float
    """See `PrefillBudget`."""

    def most(self, sequence: Sequence) -> int:
        """Tokens that a sequence may take."""
        most = min(self.tokens, PrefillBudget.tokens_of(self.work, sequence.num_computed))
        return min(most, self.rows) if sequence.wants_prompt_logprobs else most

    def take(self, sequence: Sequence, count: int, sign: int = 1) -> None:
        """Take the next `count` tokens of a sequence; with sign -1, put them back."""
        self.tokens -= sign * count
        self.rows -= sign * (count if sequence.wants_prompt_logprobs else 1)
        self.work -= sign * PrefillBudget.work(sequence.num_computed, count)


class Scheduler:
    """Holds every live sequence."""

    def __init__(
        self, kv: KVCacheManager, limits: Limits, *, target_seconds: float, num_speculative_tokens: int = 0
    ) -> None:
        """
        Args:
            target_seconds: how long a prefill step may take while streams are running.
            num_speculative_tokens: most proposed tokens of a sequence in a step.
        """
        self.waiting: deque[Sequence] = deque()
        """By priority, then in order of arrival."""
        self.running: list[Sequence] = []
        """Sequences with a place, in the same order."""
        self.preemptions = 0
        self.prefix_queries = 0
        """Prompt tokens that were looked up in the prefix cache, when their sequence first got a place,"""
        self.prefix_hits = 0
        """and those that were found."""
        self._kv = kv
        self._limits = limits
        self._budget = PrefillBudget(target_seconds)
        self._most_proposed = min(num_speculative_tokens, LOW_LATENCY_TOKENS - 1)
        self._leaving = 0
        """Sequences whose place is free once the steps in flight are read,"""
        self._preempted = 0
        """and those of them that will wait for another."""
        self._blocked: tuple[int, int] | None = None
        """The first waiting sequence for which there was no room, and the releases up to then."""
        self._admitted: list[Sequence] = []
        self._last_phase: Phase = "decode"

    def go_on_from(self, other: Scheduler) -> None:
        """Take over another one's counters and its pace, and none of its sequences."""
        self.preemptions, self._budget = other.preemptions, other._budget
        self.prefix_queries, self.prefix_hits = other.prefix_queries, other.prefix_hits

    # --- Requests -------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        _insert(self.waiting, sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands. Its place is given back when no step in flight uses it."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.PREEMPTED:
            self._preempted -= 1
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._leave(sequence)
        sequence.status = Status.FINISHED

    def step_read(self, sequence: Sequence) -> None:
        """The results of a step in flight with this sequence were read."""
        sequence.in_flight -= 1
        if not sequence.in_flight and sequence.status is not Status.RUNNING:
            self._leaving -= 1
            self._preempted -= sequence.status is Status.PREEMPTED
            self._release(sequence)

    def record(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step's duration."""
        if step.work:
            self._budget.record(step.work, seconds)

    # --- Steps ----------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step; None where nothing can run before the steps in flight are read, or nothing is to do."""
        if self._last_phase == "decode":
            step = self._prefill() or self._decode()
        else:  # A newcomer all of whose prompt but the last token is cached has nothing to prefill.
            step = self._decode() or self._prefill() or self._decode()
        if step is not None:
            self._last_phase = step.phase
            step.admitted, self._admitted = self._admitted, []
            step.copies = self._kv.take_copies()
        return step

    def _decode(self) -> ScheduledStep | None:
        """The next token of every stream whose last one is known, or on the device."""
        step = ScheduledStep("decode")
        sequences, starts, counts = step.sequences, step.starts, step.counts
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            start, total = sequence.num_computed, sequence.num_tokens
            if total - start != 1 or total == sequence.max_length:
                continue
            if sequence.synchronous and (sequence.parsing or len(sequence.tokens) != total):
                continue
            if start >= sequence.next_boundary and not self._enter_page(sequence):
                continue
            sequences.append(sequence)
            starts.append(start)
            counts.append(1)
        if not sequences:
            return None
        if self._most_proposed:
            self._speculate(step)
        for sequence in sequences:
            sequence.num_computed += 1
            sequence.num_tokens += 1
            sequence.in_flight += 1
        return step

    def _speculate(self, step: ScheduledStep) -> None:
        """Give proposed tokens to the streams in order, as far as the step and the memory go."""
        left = self._limits.decode_tokens - len(step.sequences)
        for index, sequence in enumerate(step.sequences):
            start = step.starts[index]
            # The last token that may be generated needs no place.
            most = min(self._most_proposed, left, sequence.max_length - sequence.num_tokens - 1)
            if most < 1 or sequence.lookup is None:
                continue
            proposed = sequence.lookup.propose(most)
            # Never by preempting others: whether it helps is not known.
            if not proposed or not self._kv.grow(sequence.table, start + 1 + len(proposed)):
                continue
            step.proposals[index] = proposed
            step.counts[index] += len(proposed)
            sequence.num_written = start + 1 + len(proposed)
            left -= len(proposed)

    def _enter_page(self, sequence: Sequence) -> bool:
        """A stream reaches a page boundary: keep what can be used again, and get the next page.

        False where there is none: either it comes with the steps in flight, or this sequence had to go.
        """
        start = sequence.num_computed
        # The first time its prompt has come to its end. Its answer's end is kept when it leaves its place.
        self._keep_prefix(sequence, end=not sequence.next_boundary)
        while not self._kv.grow(sequence.table, start + 1):
            if self._leaving:
                return False
            latest = self.running[-1]
            self._preempt(latest)
            if latest is sequence:
                return False
        sequence.next_boundary = (start // PAGE_TOKENS + 1) * PAGE_TOKENS
        return True

    def _prefill(self) -> ScheduledStep | None:
        """Chunks of the prompts, those that have a place first.

        Each one, unless it comes to its end, leaves half of what it finds to those behind it; what they do not take
        goes back. So no prompt takes more than twice the steps that it would take with nobody behind it.
        """
        step = ScheduledStep("prefill")
        prompts = deque(s for s in self.running if s.num_tokens - s.num_computed > 1)
        paced = len(prompts) < len(self.running)
        room = _Room(self._limits.prefill_chunk, self._limits.logits_rows, math.inf)
        while room.tokens and room.rows and room.work >= 1 and len(step.sequences) < self._limits.max_batch:
            sequence = prompts.popleft() if prompts else self._admit()
            if sequence is None:
                break
            start = sequence.num_computed
            if sequence.num_tokens - start == 1:  # All but the last token was cached: it is decoded.
                continue
            if not step.sequences:
                # All together do no more work than the oldest could alone, or it would get half of ever longer steps.
                alone = min(room.tokens, self._budget.tokens(start)) if paced else room.tokens
                room.work = PrefillBudget.work(start, alone)
            most = room.most(sequence)
            if most < sequence.num_tokens - start and (most >= PAGE_TOKENS or not step.sequences):
                # Whole pages, so that the end of a page, where the chunk is cut, does not take from this one's half.
                most -= most // 2 // PAGE_TOKENS * PAGE_TOKENS or most // 2
            count = self._chunk(sequence, most)
            if not count:
                break
            self._keep_prefix(sequence, end=False)
            room.take(sequence, count)
            step.sequences.append(sequence)
            step.starts.append(start)
            step.counts.append(count)
        if not step.sequences:
            return None
        for index in reversed(range(len(step.sequences))):
            sequence, count = step.sequences[index], step.counts[index]
            room.take(sequence, count, -1)
            # Less than before where a prompt that came later asked for a cut.
            step.counts[index] = self._chunk(sequence, max(count, room.most(sequence)))
            room.take(sequence, step.counts[index])
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            step.work += PrefillBudget.work(start, count)
            sequence.num_computed += count
            if sequence.num_computed == sequence.num_tokens:
                sequence.num_tokens += 1
            sequence.in_flight += 1
        return step

    def _chunk(self, sequence: Sequence, most: int) -> int:
        """How many of at most `most` tokens to take: to a boundary that is to be kept, else to the end of a page.

        What would draw a token is left while it is not known what the grammar allows: a decode step takes it then.
        """
        start, last = sequence.num_computed, sequence.num_tokens - sequence.parsing
        end = min(start + most, last)
        for boundary in sequence.boundaries:
            if start < boundary < end:
                return boundary - start
        if end < last and end // PAGE_TOKENS * PAGE_TOKENS > start:
            end = end // PAGE_TOKENS * PAGE_TOKENS
        return end - start

    # --- Places ---------------------------------------------------------------------------------------------------

    def _admit(self) -> Sequence | None:
        """Give the first waiting sequence a place, if there is room: nobody overtakes it."""
        if not self.waiting or self._preempted:
            return None
        sequence = self.waiting[0]
        attempt = (sequence.number, self._kv.releases)
        if attempt == self._blocked or self._is_being_computed(sequence):
            return None
        # Every running stream may soon need a page: without them it would only come to preempt the newcomer again.
        reuse = not sequence.wants_prompt_logprobs
        salt = sequence.request.params.cache_salt
        table = self._kv.open(sequence.tokens, reuse=reuse, headroom=len(self.running), salt=salt)
        if table is None:
            self._blocked = attempt
            return None
        self.waiting.popleft()
        _insert(self.running, sequence)
        self._admitted.append(sequence)
        sequence.status = Status.RUNNING
        sequence.table = table
        sequence.num_computed = sequence.kept_boundary = cached = table.cached_tokens
        sequence.num_written = 0
        sequence.next_boundary = 0
        if reuse and not sequence.admitted:
            sequence.cached_tokens = cached
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += cached
        sequence.admitted = True
        sequence.boundaries = []
        shared, missed = table.shared_tokens, table.missed_tokens
        if shared > cached and missed >= _STEP_TOKENS and not self._kv.holds(sequence.num_tokens, shared):
            sequence.boundaries.append(shared)
        return sequence

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a prompt in work has yet to compute tokens that this one shares, and enough to be worth the wait.

        That prompt is then cut where the two part, unless its sliding state there can be had without.
        """
        kv = self._kv
        keeps = kv.config.enable_prefix_caching and (kv.keeps_snapshots or not kv.config.has_sliding_layers)
        if sequence.wants_prompt_logprobs or not keeps:
            return False
        salt = sequence.request.params.cache_salt
        for other in self.running:
            if other.request.params.cache_salt != salt:
                continue
            done = other.num_computed
            if other.num_tokens - done == 1:
                continue
            shared = _common_pages(sequence.tokens, other.tokens, done)
            if shared == done:
                continue
            planned = [boundary for boundary in other.boundaries if done < boundary <= shared]
            # The wait costs a step, and where the other one must be cut for it, one more.
            if planned:
                least, end = _STEP_TOKENS, planned[-1]
            else:
                least, end = 2 * _STEP_TOKENS, shared
            head = sequence.tokens[:end]
            alike = sum(
                one.tokens[:end] == head and one.request.params.cache_salt == salt
                for one in islice(self.waiting, self._limits.max_batch)
            )
            if (end - kv.usable(sequence.tokens, salt)) * alike < least:
                continue
            if not planned and not kv.holds(other.num_tokens, shared):
                insort(other.boundaries, shared)
            return True
        return False

    def _keep_prefix(self, sequence: Sequence, *, end: bool) -> None:
        """Register a sequence's full pages, and keep its sliding state at the last boundary where that is wanted.

        Args:
            end: of its prompt, or of all that it computes.
        """
        kv, table = self._kv, sequence.table
        computed = min(sequence.num_computed, len(sequence.tokens))
        boundary = computed // PAGE_TOKENS * PAGE_TOKENS
        if boundary <= table.cached_tokens:
            return
        kv.register(table, sequence.tokens, computed)
        wanted = end or boundary in sequence.boundaries or boundary - sequence.kept_boundary >= _SPACING_TOKENS
        written = max(sequence.num_written, sequence.num_computed)
        if wanted and kv.snapshot(table, boundary, written):
            sequence.kept_boundary = boundary

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.preemptions += 1
        sequence.status = Status.PREEMPTED
        self._preempted += sequence.in_flight > 0
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            self._leaving += 1
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take the place of a sequence that no step in flight uses; a preempted one waits for another."""
        if sequence.tainted:
            # Where nothing was forbidden, the logits were not finite, and what was found may be the reason.
            self._kv.forget(sequence.table, found=not sequence.constrained)
        else:
            self._keep_prefix(sequence, end=True)
        self._kv.close(sequence.table)
        del sequence.table
        if sequence in self._admitted:
            self._admitted.remove(sequence)
        if sequence.status is Status.PREEMPTED:
            sequence.status = Status.WAITING
            sequence.num_computed = 0
            _insert(self.waiting, sequence)


def _insert(queue: deque[Sequence] | list[Sequence], sequence: Sequence) -> None:
    """Put a sequence behind those that come before it, most of which do."""
    index = len(queue)
    while index and queue[index - 1].order > sequence.order:
        index -= 1
    queue.insert(index, sequence)


def _common_pages(a: list[int], b: list[int], start: int) -> int:
    """Tokens that two prompts have in common: full pages, of `a` all but the last token; `start` where not more."""
    end, most = start // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS, min(len(a) - 1, len(b))
    # Their next page first, as most prompts differ there.
    if end > most or a[start:end] != b[start:end] or a[:start] != b[:start]:
        return start
    while end + PAGE_TOKENS <= most and a[end : end + PAGE_TOKENS] == b[end : end + PAGE_TOKENS]:
        end += PAGE_TOKENS
    return end
