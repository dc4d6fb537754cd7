"""The engine core over the reference executor, with flint-nano."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from flint_runtime import scheduler, sequence
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.manifest import Limits
from flint_runtime.memory import MemoryPlan
from flint_runtime.request import EngineRequest
from tests.runtime.cores import Collected, OracleLookup, check_idle, request, run
from tests.runtime.engines import build_reference_engine, poison
from tests.shapes import NANO, NANO_DIRECTORY

NANO_GGUF = NANO_DIRECTORY / "flint-nano-nvfp4.gguf"
_LIMITS = Limits(max_batch=64, max_context=1024, prefill_chunk=128)
_PLAN = MemoryPlan(NANO, 0, _LIMITS)
BYTES_FOR_6_PAGES = 6 * _PLAN.page_bytes + 4 * _PLAN.slot_bytes + 3 * _PLAN.sample_slot_bytes
"""And three sequences, and a snapshot."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flint-nano: window 33, three layers of each kind."""
    return build_reference_engine(NANO_GGUF, tmp_path_factory.mktemp("nano") / "engine", _LIMITS, NANO_DIRECTORY)


def open_core(engine: Path, **options: int) -> tuple[EngineCore, ReferenceExecutor]:
    """A core whose KV pools hold NaN wherever nothing was written."""
    executor = ReferenceExecutor.open(engine)
    core = EngineCore(executor, CoreConfig(**options))
    poison(executor)
    return core, executor


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 100 tokens."""
    rng = random.Random(1)
    return [rng.choices(range(700), k=1 + i * 99 // max(1, count - 1)) for i in range(count)]


def alone(engine: Path, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Tokens of every request in a core that it has for itself."""
    core, _ = open_core(engine, max_num_seqs=1)
    return {one.request_id: run(core, [one]).tokens(one.request_id) for one in requests}


def test_64_concurrent_requests_equal_one_by_one(engine: Path) -> None:
    requests = [request(str(i), tokens, 2 + i % 5) for i, tokens in enumerate(prompts(64))]
    core, _ = open_core(engine)
    found = run(core, requests)
    assert core.stats().generated_tokens == sum(one.max_tokens for one in requests)
    assert {one.request_id: found.tokens(one.request_id) for one in requests} == alone(engine, requests)
    check_idle(core)


def test_preemption_resumes_to_the_same_tokens(engine: Path) -> None:
    """K9 with a real model: more work than pages, also where draws depend on a seed and on penalties."""
    requests = [
        request(str(i), random.Random(i).choices(range(700), k=60), 75, temperature=float(i % 2), seed=i, **penalties)
        for i, penalties in enumerate([{}, {}, {"presence_penalty": 1.0, "repetition_penalty": 1.2}])
    ]
    core, _ = open_core(engine, max_num_seqs=3, max_model_len=192, kv_cache_memory_bytes=BYTES_FOR_6_PAGES)
    assert (core.stats().pages, core.stats().snapshots) == (6, 1)
    found = run(core, requests)
    assert core.stats().preemptions > 0
    assert {one.request_id: found.tokens(one.request_id) for one in requests} == alone(engine, requests)


def test_a_prefix_restores_pages_and_the_sliding_state(engine: Path) -> None:
    """K10 with a real model: the second request computes the rest of its prompt only, to the same tokens."""
    head = random.Random(9).choices(range(700), k=150)
    first, second = request("first", head, 80), request("second", [*head[:128], *head[:30]], 10)
    core, _ = open_core(engine, max_num_seqs=2)
    run(core, [first])
    before = core.stats().prompt_tokens_computed
    found = run(core, [second])
    assert found.last("second").cached_tokens == 128
    assert core.stats().prompt_tokens_computed - before == 30
    assert found.tokens("second") == alone(engine, [second])["second"]


@pytest.mark.parametrize(
    ("head", "tail", "cached"),
    [
        (70, 20, [0, 64, 64, 64]),  # The ring of 112 is not full at the end of the first prompt: it serves any prefix.
        (200, 40, [0, 192, 192, 192]),  # The end of the page where they part is still in it.
        (200, 150, [0, 0, 192, 192]),  # It is gone: the second prompt is cut there.
    ],
)
def test_a_common_head_with_different_tails(
    engine: Path, monkeypatch: pytest.MonkeyPatch, head: int, tail: int, cached: list[int]
) -> None:
    """The same prompt comes again at the end, and finds what its first time left: logprobs are those of one alone."""
    monkeypatch.setattr(scheduler, "_STEP_TOKENS", 128)
    rng = random.Random(head)
    begin = rng.choices(range(700), k=head)
    requests = [request(str(i), [*begin, *rng.choices(range(700), k=tail)], 20, logprobs=1) for i in range(4)]
    core, _ = open_core(engine, max_num_seqs=2)
    again = request("again", requests[0].prompt, 20, logprobs=1)
    for one, expected in zip([*requests, again], [*cached, (head + tail - 1) // 64 * 64], strict=True):
        found = run(core, [one])
        assert found.last(one.request_id).cached_tokens == expected
        apart, _ = open_core(engine, max_num_seqs=1, enable_prefix_caching=False)
        right = run(apart, [one])
        assert found.tokens(one.request_id) == right.tokens(one.request_id)
        logprobs = [[t.logprob for o in f.outputs[one.request_id] for t in o.tokens] for f in (found, right)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    check_idle(core)


def test_speculation_changes_no_token(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    requests = [
        request("greedy", rng.choices(range(700), k=36), 24),
        request("sampled", rng.choices(range(700), k=36), 12, temperature=1.0, seed=3),
    ]
    expected = alone(engine, requests)
    monkeypatch.setattr(sequence, "PromptLookup", OracleLookup)
    monkeypatch.setattr(OracleLookup, "answers", {tuple(one.prompt): expected[one.request_id] for one in requests})
    core, _ = open_core(engine, max_num_seqs=2, num_speculative_tokens=4)
    found = run(core, requests)
    assert 0 < core.stats().accepted_tokens < core.stats().proposed_tokens
    assert {one.request_id: found.tokens(one.request_id) for one in requests} == expected


def test_prompt_logprobs_are_those_of_generated_tokens(engine: Path) -> None:
    """What a request generated has, as the prompt of another, the logprobs it was generated with."""
    core, _ = open_core(engine, max_num_seqs=2)
    first = request("first", random.Random(5).choices(range(700), k=40), 12, logprobs=3)
    generated = [token for output in run(core, [first]).outputs["first"] for token in output.tokens]
    again = request("again", [*first.prompt, *(token.token_id for token in generated)], 1, prompt_logprobs=3)
    entries = run(core, [again]).last("again").prompt_logprobs
    assert entries is not None and len(entries) == 52
    for entry, token in zip(entries[40:], generated, strict=True):
        assert entry is not None and entry.token_id == token.token_id and entry.top_tokens == token.top_tokens
        assert entry.logprob == pytest.approx(token.logprob, abs=1e-3)


def test_cancels_in_the_middle_of_prompts(engine: Path) -> None:
    """S2 with a real model: 200 at once, some of them with a chunk in flight; then the pools serve others."""
    rng = random.Random(7)
    stay = [request(f"stay{i}", rng.choices(range(700), k=50), 30) for i in range(3)]
    go = [request(f"go{i}", rng.choices(range(700), k=300), 30) for i in range(200)]
    expected = alone(engine, [*stay, after := request("after", go[0].prompt, 10)])
    core, _ = open_core(engine, max_num_seqs=8, kv_cache_memory_bytes=8 * BYTES_FOR_6_PAGES)
    for one in (*stay, *go):
        core.add(one)
    found = Collected()
    while not any(s.in_flight and s.num_tokens - s.num_computed > 1 for s in core._scheduler.running):
        found.add(core.step())
    for one in go:
        core.abort(one.request_id)
    while core.has_work():
        found.add(core.step())
    assert {name: found.tokens(name) for name in found.outputs} == {
        one.request_id: expected[one.request_id] for one in stay
    }
    check_idle(core)
    assert run(core, [after]).tokens("after") == expected["after"]


def test_non_finite_logits_end_one_request_only(engine: Path) -> None:
    """S8: the embedding of one token is NaN."""
    core, executor = open_core(engine, max_num_seqs=3)
    tokens = random.Random(6).choices(range(700), k=40)
    expected = alone(engine, [request("good", tokens, 10)])["good"]
    table = executor._weights["embedding"]
    executor._weights["embedding"] = table.clone()
    executor._weights["embedding"][701] = torch.nan
    found = run(core, [request("bad", [*tokens, 701], 10), request("good", tokens, 10)])
    assert found.last("bad").finish_reason == "error" and found.tokens("bad") == []
    assert found.tokens("good") == expected
    check_idle(core)
