"""The engine core on a GPU: flint-nano through the plugin-host executor, requests of every kind at once.

Which kernels compute a token depends on how many tokens its step has: one, 2 to 8, or more in decode, and others in
prefill. They sum in other orders, so that where two tokens are nearly as likely, the greedy one may be the other one.
So what is computed in other company is compared with the reference executor, which must draw the same tokens but where
its own margin is below TIE (see test_end_to_end); what is computed by the same kernels must have the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flint_plugins.library import find_library
from flint_plugins.ops import PAGE_TOKENS
from flint_runtime import sequence
from flint_runtime.engine import Engine
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.executors import cuda
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.step import RowSampling, SequencePart, build_step
from flint_runtime.memory import MemoryPlan
from flint_runtime.request import EngineRequest
from tests.gpu.engines import MAX_BATCH, MAX_CONTEXT, PREFILL_CHUNK, nano_engine, nano_prompts
from tests.runtime.cores import Collected, OracleLookup, check_idle, request, run

pytestmark = pytest.mark.gpu

MAX_PAGES = -(-MAX_CONTEXT // PAGE_TOKENS)
TIE = 0.1
"""Of the logits' standard deviation."""
VOCABULARY = 700
"""Tokens that prompts are made of; flint-nano has a few more."""


@dataclass
class Case:
    """An executor, and what says what is right."""

    host: PluginHostExecutor
    reference: ReferenceExecutor

    def core(self, *, pages: int = 64, sequences: int = MAX_BATCH, snapshots: int = 8, **options: int) -> EngineCore:
        """A core with pools of about these sizes, full of NaN."""
        plan = MemoryPlan(self.host.config, 0, self.host.limits)
        memory = sequences * (plan.slot_bytes + plan.sample_slot_bytes)
        memory += pages * plan.page_bytes + snapshots * plan.slot_bytes
        core = EngineCore(self.host, CoreConfig(max_num_seqs=sequences, kv_cache_memory_bytes=memory, **options))
        self.host.poison()
        return core

    def check(self, one: EngineRequest, tokens: list[int]) -> None:
        """The reference, given the same tokens, would draw the same, but for ties."""
        every, pages, pieces = one.prompt + tokens[:-1], range(MAX_PAGES), []
        for start in range(0, len(every), PREFILL_CHUNK):
            piece = every[start : start + PREFILL_CHUNK]
            rows = [(row, RowSampling()) for row in range(len(piece))]
            result = self.reference.run(
                "prefill", build_step([SequencePart(piece, start, pages, 0, rows)]), logits=True
            )
            assert result.logits is not None
            pieces.append(result.logits)
        logits = np.concatenate(pieces)[len(one.prompt) - 1 :]
        for position, (row, token) in enumerate(zip(logits, tokens, strict=True)):
            margin = (row.max() - row[token]) / row.std()
            assert margin < TIE, f"{one.request_id}, token {position}: {token}, not {row.argmax()} by {margin:.3f}"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, device_architecture: str) -> Iterator[Case]:
    directory = nano_engine("nvfp4", device_architecture, tmp_path_factory.mktemp("engines"))
    host = PluginHostExecutor(Engine.open(directory), find_library())
    reference = ReferenceExecutor.open(directory)
    reference.allocate(pages=MAX_PAGES, slots=1, sample_slots=1)
    yield Case(host, reference)
    host.close()


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def test_64_mixed_requests(case: Case) -> None:
    """More than fit at once: all come to their end, and the greedy ones to the right tokens."""
    prompts = [*nano_prompts(), *(prompt(n, n) for n in (1, 2, 63, 64, 65, 159, 160, 161, 300, 400))]
    kinds = [
        {},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logit_bias": {5: 4.0}, "min_tokens": 3, "logprobs": 5},
        {"prompt_logprobs": 1},
    ]
    requests = [
        request(str(i), prompts[i % len(prompts)], 3 + i % 14, **kinds[i % len(kinds)])  # type: ignore[arg-type]
        for i in range(64)
    ]
    core = case.core()
    found = run(core, requests)
    for one in requests:
        assert found.last(one.request_id).finish_reason == "length", one.request_id
        assert len(found.tokens(one.request_id)) == one.max_tokens
    for one in requests[::10]:
        case.check(one, found.tokens(one.request_id))
    check_idle(core)


def test_a_cached_prefix_gives_the_same_bits(case: Case) -> None:
    """K10: the first request's prompt is longer than a chunk, which ends where the second one begins, so that the same
    kernels compute the rest. Meanwhile the first one has overwritten its ring more than once."""
    core = case.core(sequences=1)
    first = request("first", prompt(PREFILL_CHUNK + 30, 1), 120, logprobs=3)
    found = run(core, [first, replace(first, request_id="second")])
    assert found.last("first").cached_tokens == 0 and found.last("second").cached_tokens == 128
    first_tokens, second_tokens = ([t for o in found.outputs[name] for t in o.tokens] for name in ("first", "second"))
    assert first_tokens == second_tokens
    case.check(first, found.tokens("first"))


def test_a_common_head_with_different_tails(case: Case) -> None:
    """K10: a ring that was not full serves a prefix in its middle."""
    core = case.core(sequences=1)
    head = prompt(70, 2)
    for i in range(3):
        one = request(str(i), [*head, *prompt(25, 10 + i)], 60)
        found = run(core, [one])
        assert found.last(one.request_id).cached_tokens == (64 if i else 0)
        case.check(one, found.tokens(one.request_id))


def test_preemption_resumes(case: Case) -> None:
    """K9: what was preempted is prefilled again, by other kernels than those that decoded it."""
    requests = [request(str(i), prompt(60, i), 75) for i in range(3)]
    core = case.core(pages=6, sequences=3, snapshots=1, max_model_len=192)
    found = run(core, requests)
    assert core.stats().preemptions > 0
    for one in requests:
        assert len(found.tokens(one.request_id)) == one.max_tokens
        case.check(one, found.tokens(one.request_id))
    check_idle(core)


def test_speculation(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens in a step are computed by other kernels than one: the tokens of both ways may differ by ties."""
    requests = [request(str(i), prompt(50 + i, i), 60) for i in range(2)]
    off = run(case.core(), requests)
    answers = {tuple(one.prompt): off.tokens(one.request_id) for one in requests}
    monkeypatch.setattr(sequence, "PromptLookup", OracleLookup)
    monkeypatch.setattr(OracleLookup, "answers", answers)
    core = case.core(num_speculative_tokens=7)
    on = run(core, requests)
    assert 0 < core.stats().accepted_tokens < core.stats().proposed_tokens
    for one in requests:
        for found in (off, on):
            assert len(found.tokens(one.request_id)) == one.max_tokens
            case.check(one, found.tokens(one.request_id))


def test_aborts_with_steps_in_flight(case: Case) -> None:
    """S2: among them one in the middle of its prompt, whose chunk is running."""
    core, found = case.core(), Collected()
    stay = [request(f"stay{i}", prompt(40, i), 40) for i in range(2)]
    go = [request(f"go{i}", prompt(480, 100 + i), 20) for i in range(200)]
    for one in (*stay, *go):
        core.add(one)
    while not any(s.in_flight and s.num_tokens - s.num_computed > 1 for s in core._scheduler.running):
        found.add(core.step())
    for one in go:
        core.abort(one.request_id)
    while core.has_work():
        found.add(core.step())
    for one in stay:
        case.check(one, found.tokens(one.request_id))
    assert set(found.outputs) == {one.request_id for one in stay}
    check_idle(core)


def test_a_request_that_is_not_finite_fails_alone(case: Case) -> None:
    """S8: the embedding of one token is NaN."""
    host, bad_token = case.host, VOCABULARY + 1
    row_bytes = host.config.hidden_size * 2
    address = host._weight_addresses["embedding"] + bad_token * row_bytes
    saved = cuda.PinnedMemory(row_bytes)
    host._stream.download(saved.address, address, row_bytes)
    host._stream.fill(address, 0xFF, row_bytes)
    try:
        core = case.core()
        good = [request(f"good{i}", prompt(70 + i, i), 30) for i in range(2)]
        found = run(core, [good[0], request("bad", [*prompt(40, 5), bad_token, *prompt(40, 6)], 30), good[1]])
        assert found.last("bad").finish_reason == "error" and found.tokens("bad") == []
        for one in good:
            case.check(one, found.tokens(one.request_id))
        check_idle(core)
    finally:
        host._stream.upload(address, saved.address, row_bytes)
        host._stream.wait()
