"""The engine core over an executor whose every token depends on all the pages, slots and tokens it was given."""

from __future__ import annotations

import gc
import itertools
import random
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flint_runtime import engine_core, scheduler, sequence
from flint_runtime.config import ModelConfig
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import UsageError
from flint_runtime.kv_cache import KVCacheConfig, choose_kv_cache
from flint_runtime.manifest import Limits, Phase
from flint_runtime.memory import MemoryPlan
from flint_runtime.request import EngineRequest
from tests.runtime.cores import Collected, OracleLookup, check_accounting, check_idle, prefix_nodes, request, run
from tests.runtime.fake_executor import FAKE, FakeExecutor, expected_tokens

LIMITS = Limits(max_batch=8, max_context=1024, prefill_chunk=96)
SLIDING = FAKE.model_copy(update={"layer_types": ("sliding_attention",) * 6})
FULL = FAKE.model_copy(update={"layer_types": ("full_attention",) * 6})
WIDE = FAKE.model_copy(update={"sliding_window": 150})
"""A ring of several pages: what it has not overwritten yet serves several prefixes."""


def open_core(
    *,
    limits: Limits = LIMITS,
    config: ModelConfig = FAKE,
    pages: int = 200,
    sequences: int = 8,
    snapshots: int = 16,
    nan_token: int | None = None,
    **options: Any,
) -> tuple[EngineCore, FakeExecutor]:
    """A core with pools of these sizes, whatever part of the memory snapshots may take."""
    plan = MemoryPlan(config, 0, limits)
    memory = sequences * (plan.slot_bytes + plan.sample_slot_bytes) + snapshots * plan.slot_bytes
    memory += pages * (plan.page_bytes or 4 * plan.slot_bytes)
    executor = FakeExecutor(limits, config, nan_token=nan_token)
    given_options: dict[str, Any] = {"max_num_seqs": sequences, "kv_cache_memory_bytes": memory} | options

    def choose(*args: Any, **kwargs: Any) -> KVCacheConfig:
        chosen = choose_kv_cache(*args, **kwargs)
        spare = snapshots if chosen.num_slots > sequences else 0
        length = min(chosen.max_model_len, pages * 64) if config.full_layers else chosen.max_model_len
        return replace(chosen, num_pages=pages, num_slots=sequences + spare, max_model_len=length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "choose_kv_cache", choose)
        return EngineCore(executor, CoreConfig(**given_options)), executor


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(64), k=length)


@pytest.fixture
def short_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cut for snapshots even where they are short."""
    _short_cuts(monkeypatch)


def _short_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_STEP_TOKENS", 64)


# --- Random traffic (K8) ----------------------------------------------------------------------------------------------


class Traffic:
    """Adds, aborts and steps at random, and remembers what must come of it."""

    def __init__(self, core: EngineCore, config: ModelConfig, rng: random.Random, nan_token: int | None = None) -> None:
        self.core, self.config, self.rng, self.nan_token = core, config, rng, nan_token
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.found = Collected()
        self._families = [prompt(core.max_model_len, seed) for seed in range(3)]

    def add(self) -> None:
        """A request: some share their beginnings, some continue an earlier conversation, some ask for everything."""
        rng, most = self.rng, self.core.max_model_len
        if self.found.outputs and rng.random() < 0.3:
            earlier = rng.choice(list(self.found.outputs))
            tokens = self.requests[earlier].prompt + self.found.tokens(earlier)
        else:
            tokens = rng.choice(self._families)[: rng.choice([64, 128, rng.randrange(most)])]
        tokens = [*tokens[: most - 20], *(rng.randrange(64) for _ in range(rng.randrange(1, 10)))]
        max_tokens = rng.randint(1, min(150, most - len(tokens)))
        params: dict[str, Any] = {}
        for chance, some in (
            (0.2, {"temperature": 1.0, "seed": rng.getrandbits(64)}),
            (0.2, {"presence_penalty": 0.3, "frequency_penalty": 0.1, "repetition_penalty": 1.1}),
            (0.2, {"logit_bias": {3: 1.0, 5: -1.0}}),
            (0.2, {"min_tokens": rng.randint(1, max_tokens)}),
            (0.1, {"prompt_logprobs": 2}),
        ):
            params |= some if rng.random() < chance else {}
        one = request(
            str(len(self.requests)), tokens, max_tokens, stop=rng.sample(range(64), rng.choice([0, 2])), **params
        )
        self.requests[one.request_id] = one
        OracleLookup.answers[tuple(tokens)] = expected_tokens(one, self.config)
        self.core.add(one)

    def abort(self) -> None:
        """Any request, running or not."""
        request_id = self.rng.choice(list(self.requests))
        outputs = self.found.outputs.get(request_id)
        if not outputs or not outputs[-1].finish_reason:
            self.aborted.add(request_id)
        self.core.abort(request_id)

    def step(self) -> None:
        """One step of the core."""
        outputs = self.core.step()
        assert not self.aborted & {output.request_id for output in outputs}
        self.found.add(outputs)
        check_accounting(self.core)

    def check(self) -> None:
        """After the last step: nothing is used, and every request has the tokens that it has alone."""
        check_idle(self.core)
        for request_id, one in self.requests.items():
            expected, tokens = expected_tokens(one, self.config), self.found.tokens(request_id)
            if request_id in self.aborted:
                assert tokens == expected[: len(tokens)]
                continue
            reason = "stop" if expected[-1] in one.stop_token_ids else "length"
            if self.nan_token in (every := one.prompt + expected[:-1]):
                reason = "error"
                expected = expected[: max(0, every.index(self.nan_token) + 1 - len(one.prompt))]
            assert tokens == expected and self.found.last(request_id).finish_reason == reason


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    rng=st.randoms(use_true_random=False),
    actions=st.lists(
        st.sampled_from(["add", "add", "add", "abort", "step", "step", "step"]), min_size=20, max_size=120
    ),
    config=st.sampled_from([FAKE, FAKE, WIDE, WIDE, SLIDING, FULL]),
    sequences=st.integers(1, 6),
    pages=st.integers(8, 16),
    snapshots=st.integers(0, 8),
    chunk=st.sampled_from([16, 64, 200]),
    speculative=st.sampled_from([0, 0, 3, 7]),
    caching=st.sampled_from([True, True, True, False]),
    target=st.sampled_from([1e-9, 1e-3, 1.0]),
    nan_token=st.sampled_from([None, None, 63]),
)
def test_random_traffic(
    rng: random.Random,
    actions: list[str],
    config: ModelConfig,
    sequences: int,
    pages: int,
    snapshots: int,
    chunk: int,
    speculative: int,
    caching: bool,
    target: float,
    nan_token: int | None,
) -> None:
    """K8: accounting returns to zero, no page has two owners, and tokens are those of the request alone; also where a
    token makes a request fail (S8)."""
    if config is SLIDING:
        nan_token = None  # There it is out of sight some day, and who shared the prefix behind it is fine.
    with pytest.MonkeyPatch.context() as patch:
        _short_cuts(patch)
        patch.setattr(scheduler, "_SPACING_TOKENS", 128)
        patch.setattr(sequence, "PromptLookup", OracleLookup)
        core, _ = open_core(
            limits=Limits(max_batch=6, max_context=512, prefill_chunk=chunk),
            config=config,
            sequences=sequences,
            pages=pages,
            snapshots=snapshots,
            max_model_len=480,
            num_speculative_tokens=speculative,
            enable_prefix_caching=caching,
            prefill_target_seconds=target,
            nan_token=nan_token,
        )
        traffic = Traffic(core, config, rng, nan_token)
        for action in actions:
            if action == "add":
                traffic.add()
            elif action == "abort" and traffic.requests:
                traffic.abort()
            else:
                for _ in range(rng.randrange(8)):
                    traffic.step()
        steps = 0
        while core.has_work():
            traffic.step()
            steps += 1
            assert steps < 20_000
        traffic.check()


# --- Many requests, little memory -------------------------------------------------------------------------------------


def test_64_concurrent_requests() -> None:
    core, _ = open_core(limits=Limits(max_batch=64, max_context=1024, prefill_chunk=256), sequences=64, pages=500)
    requests = [request(str(i), prompt(1 + 7 * i, i), 20 + i % 13) for i in range(64)]
    found = run(core, requests)
    for one in requests:
        assert found.tokens(one.request_id) == expected_tokens(one)
        assert found.last(one.request_id).finish_reason == "length"
    check_idle(core)
    assert core.stats().generated_tokens == sum(one.max_tokens for one in requests)


def test_more_work_than_memory() -> None:
    """K9: requests wait, the latest are preempted and resume to the same tokens, none is lost, none overtakes."""
    core, _ = open_core(pages=16, max_model_len=640)
    requests = [
        request(str(i), prompt(150, i), 300, presence_penalty=0.5, temperature=float(i % 2), seed=i) for i in range(12)
    ]
    found = run(core, requests)
    assert core.stats().preemptions > 5
    assert list(found.outputs) == [one.request_id for one in requests], "first tokens come in order of arrival"
    for one in requests:
        assert found.tokens(one.request_id) == expected_tokens(one)
    check_idle(core)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    """Its tokens come while the long one is being prefilled, in twice as many steps at most; both are as alone."""
    long, short = request("long", prompt(900), 20), request("short", prompt(30, 1), 5)
    core, executor = open_core()
    core.add(long)
    for _ in range(3):
        core.step()
    core.add(short)
    found, before = Collected(), len(executor.steps)
    while not found.outputs:
        found.add(core.step())
    # Its prompt's step, and the next one, which was submitted before that one was read.
    assert found.tokens("short") and len(executor.steps) == before + 2
    while "long" not in found.outputs:
        assert core.has_work()
        found.add(core.step())
    assert found.last("short").finish_reason == "length"
    assert core.stats().prefill_steps <= 2 * -(-900 // LIMITS.prefill_chunk)
    while core.has_work():
        found.add(core.step())
    for one in (long, short):
        assert found.tokens(one.request_id) == expected_tokens(one)
    check_idle(core)


def test_the_first_request_is_never_preempted() -> None:
    core, _ = open_core(pages=10, max_model_len=600)
    for one in (
        first := request("first", prompt(64), 500),
        *(request(str(i), prompt(64, i), 400) for i in range(1, 6)),
    ):
        core.add(one)
    tokens, steps = 0, 0
    while tokens < first.max_tokens:
        tokens += sum(len(output.tokens) for output in core.step() if output.request_id == "first")
        steps += 1
    # A token every second step at least (prefill and decode alternate), and a few steps where it waits for a page.
    assert steps < 2 * first.max_tokens + 50 and core.stats().preemptions > 0


def test_books_do_not_grow_with_traffic() -> None:
    """S13: what is kept of requests that have ended is bounded by the pools."""
    core, _ = open_core(pages=16, max_model_len=640)
    sizes = []
    for turn in range(6):
        run(core, [request(f"{turn}.{i}", prompt(130, 100 * turn + i), 10) for i in range(40)])
        check_idle(core)
        sizes.append(len(prefix_nodes(core)))
    assert sizes[-1] <= sizes[1] and max(sizes) <= core.stats().pages + 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_does_not_grow_with_traffic() -> None:
    """S13: the process has the same size after thousands of requests of every kind, a third of them aborted."""
    core, executor = open_core(pages=40, max_model_len=640, num_speculative_tokens=3)
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"logit_bias": {3: 1.0}}, {"prompt_logprobs": 1}]

    def resident_bytes_after(first: int, count: int) -> int:
        for turn in range(first, first + count, 50):
            for i in range(turn, turn + 50):
                core.add(request(str(i), prompt(64 + i % 7, i % 500), 3, **kinds[i % 4]))
            for i in range(turn, turn + 50, 3):
                core.step()
                core.abort(str(i))
            run(core)
            executor.steps.clear()
            executor.copies.clear()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes_after(0, 1000)
    assert resident_bytes_after(1000, 3000) - before < 3000 * 200, "a request leaves not even 200 bytes"
    check_idle(core)


@pytest.mark.parametrize("most", [128, 129, 150])
def test_the_context_limit(most: int) -> None:
    """K7: a prompt and its answer exactly as long as the context, and one shorter; one longer is refused. In a pool
    that holds no more, and also where the limit is not the end of a page."""
    core, executor = open_core(pages=-(-most // 64), sequences=1, snapshots=0, max_model_len=most)
    for length in (1, most - 2, most - 1):
        for total in (most - 1, most):
            if total > length:
                one = request(f"{length} {total}", prompt(length, length), total - length)
                assert run(core, [one]).tokens(one.request_id) == expected_tokens(one)
        with pytest.raises(UsageError, match=rf"at most {most} \(max_model_len\)"):
            core.add(request("long", prompt(length), most - length + 1))
    assert max(int(step.seq_lens.max()) for _, step in executor.steps) == most - 1, "the last token needs no place"
    check_idle(core)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "message"),
    [
        (0, 5, "prompt is empty"),
        (600, 41, r"600 tokens and max_tokens is 41.*at most 640 \(max_model_len\)"),
        (5, 0, "max_tokens at least 1"),
    ],
)
def test_requests_that_can_never_be_served(tokens: int, max_tokens: int, message: str) -> None:
    core, _ = open_core(pages=16, max_model_len=640)
    with pytest.raises(UsageError, match=message):
        core.add(request("a", prompt(tokens), max_tokens))
    run(core, [request("fits", prompt(600), 40)])


@pytest.mark.parametrize(
    "options",
    [{"gpu_memory_utilization": 0.0}, {"gpu_memory_utilization": 1.1}, {"num_speculative_tokens": -1},
     {"prefill_target_seconds": 0.0}],
)  # fmt: skip
def test_invalid_configs(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} must"):
        CoreConfig(**options)


def test_a_share_of_the_free_memory_is_taken() -> None:
    sizes = [
        EngineCore(FakeExecutor(LIMITS, memory_bytes=1 << 28), CoreConfig(gpu_memory_utilization=share)).kv_cache
        for share in (0.5, 1.0)
    ]
    assert 1.9 < sizes[1].num_pages / sizes[0].num_pages < 2.2


def test_invalid_ids() -> None:
    core, _ = open_core()
    with pytest.raises(UsageError, match="outside the vocabulary of 64"):
        core.add(request("a", [-1], 5))
    with pytest.raises(UsageError, match=r"logit_bias has token ids \[64\]"):
        core.add(request("a", [1], 5, logit_bias={64: 1.0}))
    core.add(request("a", [1], 5))
    with pytest.raises(UsageError, match="'a' is in use"):
        core.add(request("a", [1], 5))


# --- Prefix cache (K10) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FAKE, WIDE, SLIDING, FULL], ids=["both", "wide", "sliding", "full"])
@pytest.mark.usefixtures("short_cuts")
def test_a_prefix_is_computed_once(config: ModelConfig) -> None:
    """K10: pages are shared and the sliding state, whose ring has wrapped meanwhile, is restored."""
    core, _ = open_core(config=config)
    head = prompt(300)
    first = request("first", head, 150)
    found = run(core, [first])
    before = core.stats().prompt_tokens_computed
    # The same prompt, and one that goes on where the first one's last full page ends.
    again, longer = request("again", head, 30), request("longer", [*head, *prompt(40, 1)], 30)
    found = run(core, [again, longer])
    cached = 256
    computed = core.stats().prompt_tokens_computed - before
    assert computed == len(again.prompt) + len(longer.prompt) - 2 * cached
    for one in (again, longer):
        assert found.outputs[one.request_id][0].cached_tokens == cached
        assert found.tokens(one.request_id) == expected_tokens(one, config)
    assert core.stats().prefix_hits == 2 * cached
    assert core.stats().prefix_queries == sum(len(one.prompt) for one in (first, again, longer))


@pytest.mark.parametrize("length", [319, 320, 321, 337, 383, 384, 385])
def test_prompts_around_a_boundary(length: int) -> None:
    """No prompt is cut for what may never come: its last page boundary is still in the ring. One token is left."""
    core, executor = open_core(limits=Limits(max_batch=8, max_context=1024, prefill_chunk=1024))
    one = request("0", prompt(length), 200)
    run(core, [one])
    assert [step.token_ids.size for phase, step in executor.steps if phase == "prefill"] == [length]
    again = request("1", one.prompt, 20)
    found = run(core, [again])
    assert found.last("1").cached_tokens == (length - 1) // 64 * 64
    assert found.tokens("1") == expected_tokens(again)


def test_a_conversation_goes_on_from_its_answer() -> None:
    """Where an answer ends is kept, too."""
    core, _ = open_core()
    history, cached = prompt(30), []
    for turn in range(4):
        one = request(str(turn), history, 150)
        found = run(core, [one])
        assert found.tokens(one.request_id) == expected_tokens(one)
        cached.append(found.last(one.request_id).cached_tokens)
        history = [*history, *found.tokens(one.request_id), *prompt(10, turn + 1)]
    assert cached == [0, 128, 320, 448]
    assert core.stats().snapshots_used <= 8


@pytest.mark.usefixtures("short_cuts")
def test_a_shared_beginning_is_found_at_its_second_use() -> None:
    """Only what a prompt ends with has a snapshot at first. Where another one turns out to share pages, it gets one."""
    core, _ = open_core()
    head = prompt(200)
    cached = []
    for turn in range(3):
        one = request(str(turn), [*head, *prompt(200, turn + 1)], 10)
        found = run(core, [one])
        assert found.tokens(one.request_id) == expected_tokens(one)
        cached.append(found.last(one.request_id).cached_tokens)
    assert cached == [0, 0, 192]


def test_chunk_ends_of_a_long_prompt_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that already the second prompt with a long beginning in common saves most of it."""
    monkeypatch.setattr(scheduler, "_SPACING_TOKENS", 128)
    core, _ = open_core()
    head = prompt(500)
    run(core, [request("first", [*head, *prompt(300, 1)], 10)])
    second = request("second", [*head, *prompt(300, 2)], 10)
    found = run(core, [second])
    assert found.last("second").cached_tokens == 448
    assert found.tokens("second") == expected_tokens(second)


def test_a_prompt_of_which_all_but_one_token_is_cached() -> None:
    """It has nothing to prefill, and is alone: its only step is a decode step."""
    core, executor = open_core()
    one = request("0", prompt(65), 1)
    run(core, [one])
    found = run(core, [request("1", one.prompt, 1)])
    assert [phase for phase, _ in executor.steps] == ["prefill", "decode"]
    assert found.last("1").cached_tokens == 64 and found.tokens("1") == expected_tokens(one)


@pytest.mark.usefixtures("short_cuts")
@pytest.mark.parametrize("config", [FAKE, SLIDING, FULL])
def test_prompts_that_come_together_compute_their_prefix_once(config: ModelConfig) -> None:
    core, _ = open_core(config=config)
    requests = [request(str(i), prompt(900), 5, temperature=1.0, seed=i) for i in range(6)]
    found = run(core, requests)
    assert core.stats().prompt_tokens_computed <= 900 + 6 * 64
    for one in requests:
        assert found.tokens(one.request_id) == expected_tokens(one, config)


@pytest.mark.usefixtures("short_cuts")
def test_evicted_prefixes_are_computed_again() -> None:
    core, _ = open_core(pages=16, max_model_len=640, snapshots=2)
    requests = [request(f"{turn}.{i}", prompt(300, i), 50) for turn in range(3) for i in range(4)]
    for one in requests:
        found = run(core, [one])
        assert found.tokens(one.request_id) == expected_tokens(one)
        assert found.last(one.request_id).cached_tokens == 0
    repeated = run(core, [request("again", requests[-1].prompt, 50)])
    assert repeated.last("again").cached_tokens == 256


def test_prefix_caching_can_be_off() -> None:
    core, executor = open_core(enable_prefix_caching=False)
    for turn in range(2):
        one = request(str(turn), prompt(300), 100)
        assert run(core, [one]).tokens(one.request_id) == expected_tokens(one)
    stats = core.stats()
    assert stats.prefix_hits == stats.pages_cached == stats.snapshots == 0 and not executor.copies


# --- Aborts -----------------------------------------------------------------------------------------------------------


def test_200_aborts_at_once() -> None:
    """S2: among them waiting ones and one in the middle of its prompt; the neighbours do not notice."""
    core, _ = open_core(pages=60, max_model_len=1024)
    found = Collected()
    stay = [request(f"stay{i}", prompt(100, i), 80) for i in range(3)]
    go = [request(f"go{i}", prompt(900 if i == 3 else 100, 1000 + i), 80) for i in range(200)]
    for one in (*stay, *go):
        core.add(one)
    while not any(s.num_computed and s.num_tokens - s.num_computed > 1 for s in core._scheduler.running[4:]):
        found.add(core.step())
    for one in go:
        core.abort(one.request_id)
    while core.has_work():
        outputs = core.step()
        assert not any(output.request_id.startswith("go") for output in outputs)
        found.add(outputs)
    for one in stay:
        assert found.tokens(one.request_id) == expected_tokens(one)
    check_idle(core)
    after = request("after", prompt(64, 9), 20)
    assert run(core, [after]).tokens("after") == expected_tokens(after)


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_everything_within_a_step(steps: int) -> None:
    core, _ = open_core()
    core.add(request("a", prompt(200), 50))
    for _ in range(steps):
        core.step()
    core.abort("a")
    core.abort("a")
    assert core.step() == [] and not core.has_work()
    check_idle(core)


# --- Steps in flight --------------------------------------------------------------------------------------------------


class Recorder(FakeExecutor):
    """Notes in which order steps are submitted and read."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.most_unread = 0

    def submit(self, phase: Phase, step: Any, *, logits: bool = False) -> Any:
        """Also counts what is unread."""
        pending = super().submit(phase, step, logits=logits)
        self.most_unread = max(self.most_unread, len(self.unread))
        return pending


def test_the_next_step_is_submitted_before_the_last_is_read() -> None:
    executor = Recorder(LIMITS)
    core = EngineCore(executor)
    one = request("a", prompt(100), 30)
    assert run(core, [one]).tokens("a") == expected_tokens(one)
    assert executor.most_unread == 2
    fed = [int(step.token_ids[0]) for phase, step in executor.steps if phase == "decode"]
    assert len(fed) == 29 and all(token < 0 for token in fed), "each token came from its slot"


def test_the_token_behind_a_stop_token_is_dropped() -> None:
    every = expected_tokens(request("a", prompt(100), 30))
    one = request("a", prompt(100), 30, stop=[every[9]])
    core, executor = open_core()
    found = run(core, [one])
    assert found.tokens("a") == every[: every.index(every[9]) + 1]
    assert found.last("a").finish_reason == "stop"
    assert sum(phase == "decode" for phase, _ in executor.steps) == len(found.tokens("a"))
    check_idle(core)


def test_no_step_goes_beyond_max_tokens() -> None:
    core, executor = open_core()
    found = run(core, [request("a", prompt(100), 5)])
    assert len(found.tokens("a")) == 5 and sum(phase == "decode" for phase, _ in executor.steps) == 4


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_non_finite_logits_end_one_request_only() -> None:
    """S8: with an error; what it computed is not used again, what its neighbours share with it is."""
    core, _ = open_core(nan_token=63)
    head = [token % 63 for token in prompt(128)]
    neighbours = [request(str(i), [*head, i], 60, logit_bias={63: -10.0}) for i in range(3)]
    bad = request("bad", [*head, 63, *head], 60)
    found = run(core, [*neighbours[:2], bad, neighbours[2]])
    assert found.last("bad").finish_reason == "error" and "not finite" in (found.last("bad").error or "")
    assert found.tokens("bad") == []
    for one in neighbours:
        assert found.tokens(one.request_id) == expected_tokens(one)
    check_idle(core)
    assert run(core, [request("again", bad.prompt, 60)]).last("again").finish_reason == "error"


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("length", [70, 90])
def test_what_is_not_finite_is_not_shared(length: int, prompt_logprobs: int | None) -> None:
    """S8: nor where the request is aborted while the row that would have told is in flight."""
    core, _ = open_core(nan_token=63)
    core.add(request("bad", [63] * length, 60, prompt_logprobs=prompt_logprobs))
    assert core.step() == []
    core.abort("bad")
    while core.has_work():
        assert core.step() == []
    check_idle(core)
    assert core.stats().pages_cached == core.stats().snapshots_used == 0


def test_a_cached_prefix_that_is_not_finite_is_forgotten() -> None:
    """A prompt that was aborted before its first row leaves its pages; whoever fails over them takes them out."""
    core, executor = open_core(nan_token=63)
    head = [63, *[token % 63 for token in prompt(400)]]
    core.add(request("aborted", head, 5))
    for _ in range(3):
        core.step()
    core.abort("aborted")
    while core.has_work():
        core.step()
    assert core.stats().pages_cached > 0
    assert run(core, [request("bad", head, 5)]).last("bad").finish_reason == "error"
    assert core.stats().pages_cached == core.stats().snapshots_used == 0
    executor.nan_token = None
    good = request("good", head, 5)
    found = run(core, [good])
    assert found.last("good").cached_tokens == 0 and found.tokens("good") == expected_tokens(good)


def test_a_contradictory_bias_costs_others_no_prefix() -> None:
    core, _ = open_core()
    head = prompt(130)
    run(core, [request("first", head, 5)])
    stuck = request("stuck", [*head, 1], 5, eos=range(64), min_tokens=2)
    assert "forbid every token" in (run(core, [stuck]).last("stuck").error or "")
    assert run(core, [request("again", [*head, 2], 5)]).last("again").cached_tokens == 128


def test_min_tokens_holds_stop_tokens_back() -> None:
    stop, free = range(0, 64, 2), request("free", prompt(70), 20, stop=range(0, 64, 2))
    assert len(expected_tokens(free)) < 12, "the test needs an early stop"
    one = request("a", prompt(70), 20, stop=stop, min_tokens=12, logit_bias={4: 0.5})
    core, _ = open_core()
    tokens = run(core, [one]).tokens("a")
    assert tokens == expected_tokens(one) and len(tokens) >= 12 and all(token % 2 for token in tokens[:12])


def test_eos_is_held_back_where_it_is_ignored() -> None:
    one = request("a", prompt(70), 20, eos=range(32), min_tokens=10)
    core, _ = open_core()
    tokens = run(core, [one]).tokens("a")
    assert tokens == expected_tokens(one) and len(tokens) == 20
    assert min(tokens[:10]) >= 32 > min(tokens[10:])


def test_logprobs() -> None:
    core, _ = open_core()
    found = run(core, [request("a", prompt(70), 10, logprobs=3), request("b", prompt(70), 10)])
    for output in found.outputs["a"]:
        (token,) = output.tokens
        assert len(token.top_tokens) == len(token.top_logprobs) == 3
        assert token.top_tokens[0] == token.token_id and token.logprob == token.top_logprobs[0]
    assert all(output.tokens[0].top_tokens == () for output in found.outputs["b"])


@pytest.mark.parametrize("length", [1, 2, 150])
def test_prompt_logprobs(length: int) -> None:
    """Of every token but the first, in chunks of at most logits_rows; the prefix cache is left out."""
    limits = Limits(max_batch=8, max_context=1024, prefill_chunk=512)
    core, executor = open_core(limits=limits)
    tokens = prompt(length)
    run(core, [request("warm", [*tokens, *prompt(100)], 5)])
    found = run(core, [request("a", tokens, 5, prompt_logprobs=2), request("other", prompt(600, 3), 5)])
    logprobs = found.outputs["a"][0].prompt_logprobs
    assert logprobs is not None and logprobs[0] is None
    assert [entry.token_id for entry in logprobs[1:] if entry] == tokens[1:]
    for position, entry in enumerate(logprobs[1:], 1):
        # The likeliest token after a prefix is what it would generate.
        assert entry is not None and len(entry.top_tokens) == 2
        assert [entry.top_tokens[0]] == expected_tokens(request("x", tokens[:position], 1))
    assert all(output.prompt_logprobs is None for output in found.outputs["a"][1:])
    assert max(len(step.logits_rows) for _, step in executor.steps) <= limits.logits_rows
    assert found.tokens("a") == expected_tokens(request("a", tokens, 5))


class Counting:
    """A grammar: tokens rise by one to three, and a multiple of 20 ends the text."""

    def __init__(self, start: int) -> None:
        self.last = start

    def _allowed(self) -> list[int]:
        return [(self.last + i) % 64 for i in (1, 2, 3)]

    @property
    def triggers(self) -> frozenset[int] | None:
        """See `Grammar`."""
        return None

    def mask(self, ahead: int = 0) -> npt.NDArray[np.int32]:
        """See `Grammar`."""
        assert not ahead
        bits = np.zeros(64, bool)
        bits[self._allowed()] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        """See `Grammar`."""
        allowed = token_id in self._allowed()
        self.last = token_id
        return allowed

    def wait(self, seconds: float) -> bool:
        """See `Grammar`."""
        return True

    @property
    def error(self) -> str | None:
        """See `Grammar`."""
        return None

    @property
    def finished(self) -> bool:
        """See `Grammar`."""
        return self.last % 20 == 0


def test_grammar() -> None:
    """Constrained requests among free ones, also where they are preempted and go on."""
    core, _ = open_core(pages=10, max_model_len=600, snapshots=0)
    constrained = [request(f"g{i}", prompt(120, i), 50, grammar=Counting(i)) for i in range(3)]
    free = [request(f"f{i}", prompt(100, 10 + i), 200) for i in range(3)]
    found = run(core, [*free, *constrained])
    assert core.stats().preemptions
    for index, one in enumerate(constrained):
        tokens = [index, *found.tokens(one.request_id)]
        assert all(1 <= (b - a) % 64 <= 3 for a, b in itertools.pairwise(tokens))
        assert tokens[-1] % 20 == 0 and found.last(one.request_id).finish_reason == "stop"
    for one in free:
        assert found.tokens(one.request_id) == expected_tokens(one)


def test_a_grammar_that_allows_nothing() -> None:
    class Nothing(Counting):
        def mask(self, ahead: int = 0) -> npt.NDArray[np.int32]:
            return np.zeros(2, np.int32)

    core, _ = open_core()
    found = run(core, [request("a", prompt(10), 5, grammar=Nothing(1)), request("b", prompt(10), 5)])
    assert found.last("a").finish_reason == "error" and "forbid every token" in (found.last("a").error or "")
    assert found.last("b").finish_reason == "length"


class Slow(Counting):
    """Takes so many looks until it is known what follows."""

    looks = 3

    def __init__(self, start: int, failing: bool = False) -> None:
        super().__init__(start)
        self.failing, self.left, self.known = failing, 0, start

    def accept(self, token_id: int) -> bool:
        """See `Grammar`."""
        assert not self.left, "the core did not wait"
        self.left = self.looks
        return super().accept(token_id)

    def wait(self, seconds: float) -> bool:
        """See `Grammar`."""
        self.left = max(0, self.left - 1)
        return not self.left

    @property
    def finished(self) -> bool:
        """See `Grammar`."""
        return not self.left and not self.failing and super().finished

    @property
    def error(self) -> str | None:
        """See `Grammar`."""
        return "too slow" if not self.left and self.failing and self.last > 20 else None


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("pages", [10, 100])
def test_a_slow_grammar_sits_out(others: int, pages: int) -> None:
    """Until it is known what may follow; it ends well or with its error, and those beside it as if alone."""
    core, _ = open_core(pages=pages, max_model_len=600, snapshots=0)
    free = [request(f"f{i}", prompt(100, 10 + i), 60) for i in range(others)]
    slow = [
        request("well", prompt(100, 1), 50, grammar=Slow(1)),
        request("ill", prompt(90, 2), 50, grammar=Slow(1, True)),
    ]
    found = run(core, [*free, *slow])
    assert found.last("well").finish_reason == "stop" and found.tokens("well")[-1] % 20 == 0
    assert found.last("ill").finish_reason == "error" and found.last("ill").error == "too slow"
    for one in free:
        assert found.tokens(one.request_id) == expected_tokens(one)
    check_idle(core)


@pytest.mark.parametrize("length", [10, 64, 600])
def test_nobody_waits_for_the_grammar_of_a_request_that_is_computed_again(length: int) -> None:
    """It has lost its place before it was known what may follow: its prompt is computed, its next token later."""

    class Slower(Slow):
        looks = 30

        def mask(self, ahead: int = 0) -> npt.NDArray[np.int32]:
            """See `Grammar`."""
            assert not self.left, "the core waits for the grammar, and with it everybody"
            return super().mask(ahead)

    core, _ = open_core()
    slow, free = request("slow", prompt(length, 1), 50, grammar=Slower(1)), request("free", prompt(70, 2), 100)
    core.add(slow)
    core.add(free)
    found = Collected()
    while not slow.grammar.left:  # type: ignore[union-attr]
        found.add(core.step())
    core._torn = True  # As after a change that was cut short.
    while core.has_work():
        found.add(core.step())
    assert found.last("slow").finish_reason == "stop" and found.last("slow").error is None
    assert found.tokens("free") == expected_tokens(free)
    check_idle(core)


def test_a_grammar_goes_with_its_request() -> None:
    """Also where a step fails while it is parsed: it holds a process, and nobody may come for long."""
    core, _ = open_core()
    one = request("a", prompt(10), 50, grammar=Slow(1))
    core.add(one)
    while not one.grammar.left:  # type: ignore[union-attr]
        core.step()
    core._fail([*core._sequences.values()], RuntimeError("a step failed"))
    assert [output.finish_reason for output in core.step()] == ["error"]
    assert not core.has_work() and not core._parsing


def test_a_slow_grammar_is_aborted() -> None:
    core, _ = open_core()
    one = request("a", prompt(10), 50, grammar=Slow(1))
    core.add(one)
    while not one.grammar.left:  # type: ignore[union-attr]
        core.step()
    core.abort("a")
    while core.has_work():
        assert not core.step()
    assert not core._parsing
    check_idle(core)


# --- Speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token(monkeypatch: pytest.MonkeyPatch, most: int, temperature: float) -> None:
    """Also for sampled tokens: each is drawn with the random numbers that belong to its place."""
    monkeypatch.setattr(sequence, "PromptLookup", OracleLookup)
    requests = [request(str(i), prompt(50 + i, i), 150, temperature=temperature, seed=i, logprobs=1) for i in range(5)]
    OracleLookup.answers = {tuple(one.prompt): expected_tokens(one) for one in requests}
    core, executor = open_core(num_speculative_tokens=most)
    found = run(core, requests)
    for one in requests:
        assert found.tokens(one.request_id) == expected_tokens(one)
    stats = core.stats()
    assert 0 < stats.accepted_tokens < stats.proposed_tokens
    assert stats.generated_tokens == sum(one.max_tokens for one in requests)
    decode = [step for phase, step in executor.steps if phase == "decode"]
    assert max(len(step.token_ids) for step in decode) <= LIMITS.decode_tokens
    assert max(np.diff(step.query_start).max() for step in decode) == most + 1 <= 8
    check_idle(core)


def test_a_row_that_is_not_finite_accepts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "PromptLookup", OracleLookup)
    requests = (request("a", [token % 63 for token in prompt(50, seed)], 10) for seed in range(1000))
    one = next(r for r in requests if 63 in expected_tokens(r)[:3])
    OracleLookup.answers = {tuple(one.prompt): expected_tokens(one)}
    core, _ = open_core(num_speculative_tokens=7, nan_token=63)
    found = run(core, [one])
    assert found.last("a").finish_reason == "error"
    tokens = found.tokens("a")
    assert tokens == expected_tokens(one)[: len(tokens)] and tokens[-1] == 63
    assert 0 <= core.stats().accepted_tokens < len(tokens)


def test_speculation_from_the_text_itself() -> None:
    """The real lookup, of a prompt that repeats itself; off by default."""
    period = prompt(20)
    one = request("a", period * 5, 40)
    for most in (0, 4):
        core, _ = open_core(num_speculative_tokens=most)
        assert run(core, [one]).tokens("a") == expected_tokens(one)
        assert (core.stats().proposed_tokens > 0) == (most > 0)


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 0.1}, {"logit_bias": {1: 1.0}}, {"min_tokens": 2}, {"repetition_penalty": 1.1}]
)
def test_requests_that_do_not_speculate(params: dict[str, Any]) -> None:
    core, _ = open_core(num_speculative_tokens=4)
    one = request("a", prompt(20) * 5, 40, **params)
    assert run(core, [one]).tokens("a") == expected_tokens(one)
    assert core.stats().proposed_tokens == 0
