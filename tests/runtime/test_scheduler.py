"""The scheduler without an executor: steps are run by giving every stream a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flint_runtime import prefill_budget
from flint_runtime import scheduler as module
from flint_runtime.kv_cache import KVCacheConfig, KVCacheManager
from flint_runtime.manifest import Limits
from flint_runtime.prefill_budget import PrefillBudget
from flint_runtime.scheduler import ScheduledStep, Scheduler
from flint_runtime.sequence import Sequence, Status
from tests.runtime.cores import request

LIMITS = Limits(max_batch=4, max_context=4096, prefill_chunk=256)
SIZES = KVCacheConfig(
    num_pages=64,
    max_num_seqs=4,
    num_slots=6,
    max_model_len=4096,
    sliding_window=33,
    ring_tokens=112,
    has_full_layers=True,
    has_sliding_layers=True,
    enable_prefix_caching=True,
)


class Driver:
    """A scheduler, and what the core would do: run its steps one by one, or leave them in flight."""

    def __init__(self, sizes: KVCacheConfig = SIZES, *, target_seconds: float = 10.0) -> None:
        self.kv = KVCacheManager(sizes)
        self.scheduler = Scheduler(self.kv, LIMITS, target_seconds=target_seconds)
        self.count = 0

    def add(self, length: int, max_tokens: int = 50, *, head: list[int] | None = None, **params: Any) -> Sequence:
        """A request of `length` prompt tokens; each prompt is like no other, but for its `head`."""
        prompt = head or []
        prompt = prompt + [(self.count * 7 + i) % 50_000 for i in range(length - len(prompt))]
        sequence = Sequence(request(str(self.count), prompt, max_tokens, **params), self.count, speculative=False)
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def read(self, step: ScheduledStep) -> None:
        """Hand out tokens of a step."""
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            if start + count == len(sequence.tokens) and sequence.status is not Status.FINISHED:
                sequence.tokens.append(1)
                if len(sequence.tokens) == sequence.max_length:
                    self.scheduler.finish(sequence)
            self.scheduler.step_read(sequence)

    def step(self) -> tuple[str, dict[int, int]]:
        """Run the next step, which takes a millisecond a token: its phase, and its tokens by sequence."""
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.record(step, 0.001 * sum(step.counts))
        self.read(step)
        return step.phase, {s.number: n for s, n in zip(step.sequences, step.counts, strict=True)}


def test_prompts_fill_a_step_in_order_of_arrival() -> None:
    driver = Driver()
    for length in (100, 200, 30):
        driver.add(length)
    # The second does not fit: it leaves room to the third, and ends with a page.
    assert driver.step() == ("prefill", {0: 100, 1: 64, 2: 30})
    assert driver.step() == ("decode", {0: 1, 2: 1})
    assert driver.step() == ("prefill", {1: 136})
    assert driver.step() == ("decode", {0: 1, 1: 1, 2: 1})


def test_prefill_and_decode_alternate_while_streams_run() -> None:
    driver = Driver(target_seconds=1e-9)
    driver.add(10)
    assert driver.step()[0] == "prefill"
    driver.add(500)
    steps = [driver.step() for _ in range(16)]
    assert [phase for phase, _ in steps] == ["decode", "prefill"] * 8
    # However tight the target: a page's worth, so that a prompt comes to its end.
    assert [tokens for phase, tokens in steps if phase == "prefill"] == [{1: 64}] * 7 + [{1: 52}]
    assert driver.step() == ("decode", {0: 1, 1: 1})


def test_a_prompt_gets_whole_chunks_while_no_stream_runs() -> None:
    driver = Driver(target_seconds=1e-9)
    driver.add(600)
    assert [driver.step()[1] for _ in range(3)] == [{0: 256}, {0: 256}, {0: 88}]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    driver = Driver()
    driver.add(3000)
    assert driver.step() == ("prefill", {0: 256})
    driver.add(40)
    driver.add(300)
    # What the others leave of their half goes back, in whole pages.
    assert driver.step() == ("prefill", {0: 128, 1: 40, 2: 64})
    assert driver.step() == ("decode", {1: 1})
    assert driver.step() == ("prefill", {0: 128, 2: 128})
    driver.add(10)
    assert driver.step() == ("decode", {1: 1})
    assert driver.step() == ("prefill", {0: 128, 2: 108, 3: 10}), "behind two that are longer"
    assert driver.step() == ("decode", {1: 1, 2: 1, 3: 1})
    assert driver.step() == ("prefill", {0: 256})


def test_what_is_less_than_a_page_is_not_shared_out() -> None:
    driver = Driver()
    for length in (200, 400, 400):
        driver.add(length)
    assert driver.step() == ("prefill", {0: 200, 1: 56})


@pytest.mark.parametrize("target", [1e-9, 0.15, 0.21, 10.0])
@pytest.mark.parametrize("lengths", [[120], [4, 200, 64], [1500]])
def test_short_prompts_take_no_more_than_half_from_a_long_one(target: float, lengths: list[int]) -> None:
    """Beside a stream, as alone: twice as many steps at most, and none is longer."""

    def steps(lengths: list[int]) -> list[float]:
        """Work of the steps in which 2,000 tokens are prefilled, while prompts of these lengths come for ever."""
        driver, work = Driver(target_seconds=target), []
        driver.add(10, max_tokens=4000)
        driver.step()
        long = driver.add(2000)
        while long.num_computed < 2000:
            if lengths and len(driver.scheduler.waiting) < 2:
                driver.add(lengths[driver.count % len(lengths)], max_tokens=2)
            step = driver.scheduler.schedule()
            assert step is not None
            work.append(step.work)
            driver.scheduler.record(step, 0.001 * step.work)
            driver.read(step)
        return [w for w in work if w]

    alone, shared = steps([]), steps(lengths)
    assert len(alone) < len(shared) <= 2 * len(alone)
    assert max(shared) <= max(alone) + 1e-3


def test_tokens_with_a_long_context_count_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_budget, "_DOUBLING_TOKENS", 100)
    driver = Driver()
    first = driver.add(1024, max_tokens=1)
    while first.status is not Status.FINISHED:
        driver.step()
    driver.add(600)
    driver.add(2000, head=first.tokens[:1024])
    step = driver.scheduler.schedule()
    # 256 tokens of the first are as much work as 128 and 32 that have 1,024 before them.
    assert step is not None and step.starts == [0, 1024] and step.counts == [128, 32]
    assert step.work <= PrefillBudget.work(0, 256)


def test_a_newcomer_does_not_cost_a_long_prompt_its_place() -> None:
    """Where streams need the pages that the newcomer took, it has to go, not the prompt that was there before."""
    driver = Driver(replace(SIZES, num_pages=80, enable_prefix_caching=False), target_seconds=1e-9)
    for _ in range(2):
        driver.add(127, max_tokens=200)
    driver.step()
    long, newcomer = driver.add(4000), driver.add(600)
    driver.step()
    while driver.scheduler.preemptions == 0:
        driver.step()
    assert newcomer.status is Status.WAITING and len(newcomer.tokens) > 600
    assert long.status is Status.RUNNING and 0 < long.num_computed < 4000


@pytest.fixture
def cheap_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts and waits are worth it for a few pages."""
    monkeypatch.setattr(module, "_STEP_TOKENS", 128)


@pytest.mark.usefixtures("cheap_steps")
def test_a_prompt_waits_for_one_that_computes_the_same() -> None:
    """They part near the end, so that the state there can be had without a cut."""
    driver = Driver()
    first = driver.add(1000)
    assert driver.step() == ("prefill", {0: 256})
    same = driver.add(990, head=first.tokens[:980])
    other = driver.add(50)
    assert [driver.step()[1] for _ in range(3)] == [{0: 256}, {0: 256}, {0: 232}]
    assert driver.step() == ("decode", {0: 1})
    assert driver.step() == ("prefill", {1: 30, 2: 50})
    assert (same.cached_tokens, other.cached_tokens) == (960, 0)


@pytest.mark.usefixtures("cheap_steps")
def test_a_prompt_in_work_is_cut_where_another_one_parts_from_it() -> None:
    driver = Driver()
    first = driver.add(1000)
    assert driver.step() == ("prefill", {0: 256})
    early = driver.add(500, head=first.tokens[:460])
    assert driver.step() == ("prefill", {0: 192})
    assert driver.step() == ("prefill", {0: 192, 1: 52})
    assert early.cached_tokens == 448


@pytest.mark.usefixtures("cheap_steps")
@pytest.mark.parametrize(
    ("length", "steps"),
    [(600, [("prefill", {0: 192}), ("prefill", {0: 128, 1: 64, 2: 64})]), (250, [("prefill", {0: 250})])],
)
def test_prompts_that_come_together(length: int, steps: list[tuple[str, dict[int, int]]]) -> None:
    """The first one's chunk, which was chosen already, is cut, unless it keeps the state without."""
    driver = Driver()
    first = driver.add(length)
    others = [driver.add(length, head=first.tokens[:200]) for _ in range(2)]
    assert [driver.step() for _ in steps] == steps
    while others[1].status is Status.WAITING:
        driver.step()
    assert [other.cached_tokens for other in others] == [192, 192]


@pytest.mark.usefixtures("cheap_steps")
@pytest.mark.parametrize("others", [1, 2])
def test_a_wait_must_be_worth_it_for_all_that_wait(others: int) -> None:
    """A page less to compute for one does not make up for a step and a cut, but it does for two."""
    driver = Driver()
    first = driver.add(1000)
    for _ in range(others):
        driver.add(1000, head=first.tokens[:140])
    assert driver.step() == ("prefill", {0: 128, 1: 128} if others == 1 else {0: 128})


@pytest.mark.usefixtures("cheap_steps")
def test_a_cut_that_is_made_anyway_is_waited_for_sooner() -> None:
    driver, head = Driver(), list(range(-140, 0))
    driver.add(256, 1, head=head)
    driver.step()
    driver.add(256, 1, head=head)
    driver.add(256, 1, head=head)
    assert driver.step() == ("prefill", {1: 128})
    assert driver.step() == ("prefill", {1: 128, 2: 128})


@pytest.mark.parametrize(("first", "end"), [(0, 100), (0, 350), (1, 1000)])
def test_a_prompt_does_not_wait_in_vain(monkeypatch: pytest.MonkeyPatch, first: int, end: int) -> None:
    """Where what two share is computed, not worth a step and a cut, or not their beginning."""
    monkeypatch.setattr(module, "_STEP_TOKENS", 200)
    driver = Driver()
    other = driver.add(1000)
    driver.step()
    driver.add(1000, head=[-1] * first + other.tokens[first:end])
    assert driver.step() == ("prefill", {0: 128, 1: 128})


@pytest.mark.usefixtures("cheap_steps")
@pytest.mark.parametrize("sizes", [{"num_slots": 4}, {"enable_prefix_caching": False, "num_slots": 4}])
def test_nobody_waits_for_what_cannot_be_kept(sizes: dict[str, Any]) -> None:
    driver = Driver(replace(SIZES, **sizes))
    first = driver.add(1000)
    driver.add(1000, head=first.tokens[:900])
    assert driver.step() == ("prefill", {0: 128, 1: 128})


@pytest.mark.usefixtures("cheap_steps")
def test_nobody_waits_for_what_is_cached() -> None:
    """The one with prompt logprobs computes all of it, but the other one finds it."""
    driver = Driver()
    first = driver.add(1000, 1)
    while first.status is not Status.FINISHED:
        driver.step()
    driver.add(1000, head=first.tokens[:980], prompt_logprobs=0)
    last = driver.add(1000, head=first.tokens[:980])
    assert driver.step() == ("prefill", {1: 192, 2: 40})
    assert last.cached_tokens == 960


def test_a_wait_ends_with_the_prompt_that_was_waited_for() -> None:
    driver = Driver()
    first = driver.add(2000)
    driver.step()
    driver.add(1990, head=first.tokens[:1980])
    assert driver.step() == ("prefill", {0: 256})
    driver.scheduler.finish(first)
    # What it had computed is there, as far as its place still holds the state.
    assert driver.step() == ("prefill", {1: 256})
    assert driver.scheduler.running[0].cached_tokens == 512


def test_the_budget_follows_measured_durations() -> None:
    driver = Driver(target_seconds=0.04)
    driver.add(10)
    driver.step()
    driver.add(3500)
    sizes = []
    for _ in range(30):
        step = driver.scheduler.schedule()
        assert step is not None
        if step.phase == "prefill":
            sizes.append(sum(step.counts))
            driver.scheduler.record(step, 0.001 + sizes[-1] * 0.25e-3)
        driver.read(step)
    assert sizes[0] == 256
    assert set(sizes[5:]) == {128}, "two pages take 33 ms, three would take 49"


def test_a_stream_whose_token_is_not_read_goes_on_unless_it_needs_the_token() -> None:
    driver = Driver()
    driver.add(10)
    held = driver.add(10)
    held.synchronous = True
    first = driver.scheduler.schedule()
    second = driver.scheduler.schedule()
    assert first is not None and second is not None
    assert [s.number for s in first.sequences] == [0, 1] and [s.number for s in second.sequences] == [0]
    driver.read(first)
    third = driver.scheduler.schedule()
    assert third is not None and [s.number for s in third.sequences] == [0, 1]


def test_admission_waits_for_memory_in_order() -> None:
    driver = Driver(replace(SIZES, num_pages=10, max_model_len=640))
    driver.add(256, max_tokens=3)
    driver.add(400)
    driver.add(10)
    assert driver.step() == ("prefill", {0: 256})
    # The second needs 7 pages, and a page for the running stream must be left. The third would fit, but came later.
    assert [driver.step() for _ in range(2)] == [("decode", {0: 1})] * 2
    assert driver.step() == ("prefill", {1: 192, 2: 10}), "the first has ended"


def test_admission_waits_for_a_slot() -> None:
    driver = Driver()
    for _ in range(5):
        driver.add(10, max_tokens=2)
    assert driver.step() == ("prefill", dict.fromkeys(range(4), 10))
    assert driver.step() == ("decode", dict.fromkeys(range(4), 1))
    assert driver.step() == ("prefill", {4: 10})


def test_the_latest_gives_its_place_back() -> None:
    driver = Driver(replace(SIZES, num_pages=6, max_model_len=384, enable_prefix_caching=False))
    sequences = [driver.add(64, max_tokens=200) for _ in range(2)]
    assert driver.step() == ("prefill", {0: 64, 1: 64})
    assert [driver.step() for _ in range(128)] == [("decode", {0: 1, 1: 1})] * 128
    assert driver.step() == ("decode", {0: 1}), "both need a fourth page"
    assert driver.scheduler.preemptions == 1 and sequences[1].status is Status.WAITING
    while sequences[0].status is Status.RUNNING:
        assert driver.step() == ("decode", {0: 1})
    assert driver.step() == ("prefill", {1: 64 + 129}), "with the tokens that it had generated"
    assert driver.step() == ("decode", {1: 1})


def test_a_place_in_flight_is_not_given_away() -> None:
    driver = Driver(replace(SIZES, num_pages=6, max_model_len=384, enable_prefix_caching=False))
    sequences = [driver.add(64, max_tokens=200) for _ in range(2)]
    for _ in range(128):
        driver.step()
    flying = driver.scheduler.schedule()
    assert flying is not None and len(flying.sequences) == 2
    # Both need a fourth page now. The second one has to go, but its last step is still running.
    assert driver.scheduler.schedule() is None
    assert sequences[1].status is Status.PREEMPTED and driver.kv.pool.available == 0
    driver.read(flying)
    assert sequences[1].status is Status.WAITING and driver.kv.pool.available == 3
    assert len(sequences[1].tokens) == sequences[1].num_tokens, "the token that was on its way is not lost"
    assert driver.step() == ("decode", {0: 1})


def test_prompt_logprobs_take_no_more_rows_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "logits_rows", 100)
    driver = Driver()
    driver.add(150, prompt_logprobs=0)
    driver.add(30)
    assert driver.step() == ("prefill", {0: 64, 1: 30})
    assert driver.step() == ("decode", {1: 1})
    assert driver.step() == ("prefill", {0: 86})


@pytest.mark.parametrize(
    ("tail", "steps"),
    [
        # Cut at 192 once 2 x 192 tokens were computed again, and then no more.
        (200, [{0: 256}, {0: 136}, {1: 256}, {1: 136}, {2: 192}, {2: 200}, {3: 200}, {4: 200}]),
        # The state at 192 is still there at the end.
        (64, [{0: 256}, {1: 64}, {2: 64}]),
    ],
)
def test_prompts_are_cut_where_they_part(
    monkeypatch: pytest.MonkeyPatch, tail: int, steps: list[dict[int, int]]
) -> None:
    monkeypatch.setattr(module, "_STEP_TOKENS", 384)
    driver, head = Driver(), list(range(-192, 0))
    found: list[dict[int, int]] = []
    while len(found) < len(steps):
        if not driver.scheduler.running:
            driver.add(192 + tail, 1, head=head)
        found.append(driver.step()[1])
    assert found == steps


def test_aborting_in_every_state() -> None:
    driver = Driver(replace(SIZES, num_pages=7, max_model_len=384))
    running, chunked, waiting = driver.add(10), driver.add(300), driver.add(300)
    flying = driver.scheduler.schedule()
    assert flying is not None and flying.counts == [10, 192] and waiting.status is Status.WAITING
    for sequence in (waiting, chunked, running):
        driver.scheduler.finish(sequence)
    assert driver.kv.gauges().slots_used == 2, "two are in flight"
    assert driver.scheduler.schedule() is None
    driver.read(flying)
    assert driver.kv.gauges().slots_used == driver.kv.gauges().pages_used == 0
    assert not driver.scheduler.running and not driver.scheduler.waiting


@pytest.mark.parametrize(("written", "kept"), [(144, 1), (145, 0)])
def test_rejected_tokens_overwrite_the_ring(written: int, kept: int) -> None:
    """The ring still has the state at 64 when 80 tokens behind it were written, however many of them stay."""
    driver = Driver()
    sequence = driver.add(76)
    driver.step()
    sequence.num_written = written
    driver.scheduler.finish(sequence)
    assert driver.kv.gauges().snapshots_used == kept


def test_a_new_scheduler_goes_on_with_counters_and_pace() -> None:
    """And with none of the old one's sequences."""
    driver = Driver(target_seconds=0.04)
    driver.add(10)
    driver.step()
    driver.add(3500)
    for _ in range(30):
        driver.step()
    old = driver.scheduler
    driver.kv = KVCacheManager(SIZES)
    driver.scheduler = Scheduler(driver.kv, LIMITS, target_seconds=0.04)
    driver.scheduler.go_on_from(old)
    assert driver.scheduler.prefix_queries == 3510
    assert not driver.scheduler.running and not driver.scheduler.waiting
    driver.add(10)
    driver.step()
    driver.add(3500)
    assert driver.step()[0] == "decode"
    assert driver.step() == ("prefill", {3: old._budget.tokens(0) // 64 * 64}), "no step to find the pace again"
