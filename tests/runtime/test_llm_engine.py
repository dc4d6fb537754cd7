"""Requests over the core and the reference executor, on a random model of flint-nano's shape; and their checks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import EngineDeadError, UsageError
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.manifest import Limits
from flint_runtime.outputs import CompletionOutput
from flint_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from flint_runtime.tokenizer import Tokenizer
from tests.runtime.engines import Place, build_reference_engine, feed, open_poisoned
from tests.tools.checkpoints import flint_config, random_checkpoint

CONTEXT = 100
GREEDY = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
PROMPT = list(range(40, 90))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of each kind; window 33; prefill in chunks of 16."""
    directory = tmp_path_factory.mktemp("engine")
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = flint_config(
        layers=3, hidden=128, experts=8, heads=4, kv_heads=2, head_dim=128, intermediate=128, moe_intermediate=64,
        shared_intermediate=64, vocab=768, window=33, context=4096, layer_types=kinds, mlp_only_layers=[0],
    )  # fmt: skip
    checkpoint = random_checkpoint(directory / "model", config, "bf16", seed=5)
    limits = Limits(max_batch=2, max_context=CONTEXT, prefill_chunk=16)
    return build_reference_engine(checkpoint, directory / "engine", limits)


@pytest.fixture
def engine(directory: Path) -> LLMEngine:
    return LLMEngine.open(directory, "reference", CoreConfig(enable_prefix_caching=False))


def answer(engine: LLMEngine, prompt: str | list[int], **params: Any) -> CompletionOutput:
    """The only answer to one request."""
    engine.add_request(engine.prepare("r", prompt, SamplingParams(**params)))
    while True:
        for output in engine.step():
            if output.finished:
                return output.outputs[0]


def ids(engine: LLMEngine, prompt: list[int], **params: Any) -> list[int]:
    """Token ids of an answer."""
    return answer(engine, prompt, **params).token_ids


def test_greedy_takes_the_best_of_every_prefix(directory: Path, engine: LLMEngine) -> None:
    found = answer(engine, PROMPT, **GREEDY, logprobs=0)
    executor = open_poisoned(directory)
    logits = feed(executor, Place(executor), PROMPT + found.token_ids[:-1], 16)[len(PROMPT) - 1 :]
    assert found.token_ids == logits.argmax(-1).tolist()
    exact = torch.from_numpy(logits).log_softmax(-1).max(-1).values
    assert found.logprobs is not None
    logprobs = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
    np.testing.assert_allclose(logprobs, exact, atol=1e-4)
    assert found.cumulative_logprob == pytest.approx(exact.sum().item(), abs=1e-3)
    assert found.finish_reason == "length"


def test_text_is_that_of_the_ids(engine: LLMEngine) -> None:
    found = answer(engine, "Hello, world", seed=1, max_tokens=40, ignore_eos=True)
    assert found.text == engine.tokenizer.decode(found.token_ids)


def test_an_engine_can_be_used_again(engine: LLMEngine) -> None:
    first = ids(engine, PROMPT, **GREEDY)
    assert ids(engine, PROMPT[:3], **GREEDY) != first
    assert ids(engine, PROMPT, **GREEDY) == first


def test_seed(engine: LLMEngine) -> None:
    runs = [ids(engine, PROMPT, seed=s, max_tokens=20, ignore_eos=True) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    unseeded = [ids(engine, PROMPT, max_tokens=20, ignore_eos=True) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens(engine: LLMEngine, ignore_eos: bool) -> None:
    """stop_token_ids end a generation, ignore_eos or not, but not before min_tokens; the stop token is the last one."""
    every = ids(engine, PROMPT, **GREEDY)
    stop = every[7]
    params = GREEDY | {"ignore_eos": ignore_eos, "stop_token_ids": [stop]}
    found = answer(engine, PROMPT, **params)
    assert found.token_ids == every[: every.index(stop) + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    later = ids(engine, PROMPT, **params, min_tokens=12)
    assert len(later) > 12 and stop not in later[:12]


def test_eos(engine: LLMEngine) -> None:
    every = ids(engine, PROMPT, **GREEDY)
    engine.tokenizer.eos_token_ids = (every[4],)
    found = answer(engine, PROMPT, temperature=0.0, max_tokens=20)
    assert len(found.token_ids) == every.index(every[4]) + 1
    assert (found.finish_reason, found.stop_reason) == ("stop", None)
    assert ids(engine, PROMPT, **GREEDY) == every


def test_penalties_see_prompt_and_output(engine: LLMEngine) -> None:
    found = ids(engine, PROMPT, **GREEDY | {"max_tokens": 30, "repetition_penalty": 1e6})
    assert len(set(found)) == 30 and not set(found) & set(PROMPT)


def test_logit_bias(engine: LLMEngine) -> None:
    plain = ids(engine, PROMPT, **GREEDY)
    assert ids(engine, PROMPT, **GREEDY, logit_bias={5: 100}) == [5] * 20
    assert plain[0] not in ids(engine, PROMPT, **GREEDY, logit_bias={plain[0]: -100})
    with pytest.raises(UsageError, match="logit_bias has token ids"):
        answer(engine, PROMPT, logit_bias={768: 1})


def test_context_limit(engine: LLMEngine) -> None:
    """K7: max_tokens below, at and above the limit; above, an answer ends there, as vLLM's do. A prompt must fit."""
    room = CONTEXT - len(PROMPT)
    for most in (room - 1, room, room + 1, 2**31 - 1):
        found = answer(engine, PROMPT, **GREEDY | {"max_tokens": most})
        assert (len(found.token_ids), found.finish_reason) == (min(most, room), "length")
    full = [*PROMPT, *PROMPT]
    assert len(ids(engine, full[:-1], max_tokens=1)) == 1
    with pytest.raises(UsageError, match="prompt has 100 tokens; this engine's context is 100"):
        engine.prepare("r", full, SamplingParams(max_tokens=1))


def test_without_max_tokens_the_context_is_the_end(engine: LLMEngine) -> None:
    found = answer(engine, PROMPT, temperature=0.0, ignore_eos=True)
    assert len(found.token_ids) == CONTEXT - len(PROMPT) and found.finish_reason == "length"


@pytest.mark.parametrize("prompt", [[], "", [768], [-1], [1.5], [True], ["a"]])
def test_prompts_that_cannot_be_served(engine: LLMEngine, prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        answer(engine, prompt, **GREEDY)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": [768], "min_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": [10**400]}, "stop_token_ids"),
        ({"logit_bias": {768: 1.0}}, "logit_bias"),
        ({"temperature": 1e39}, "temperature"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"frequency_penalty": None}, "frequency_penalty"),
    ],
)
def test_parameters_that_do_not_fit_the_engine(engine: LLMEngine, params: dict[str, Any], name: str) -> None:
    """They are refused before anything runs, and never get into a step."""
    with pytest.raises(UsageError, match=name):
        engine.prepare("r", PROMPT, SamplingParams(**params))
    assert not engine.has_work()


def test_nothing_is_left_of_a_request_that_is_refused(engine: LLMEngine) -> None:
    """Also where the engine takes the first of its answers and refuses the second."""
    request = engine.prepare("r", PROMPT, SamplingParams(n=2, max_tokens=2))
    object.__setattr__(request.choices[1].params, "temperature", 1e39)
    with pytest.raises(UsageError, match="temperature"):
        engine.add_request(request)
    assert not engine.has_work() and not engine.has_unfinished_requests()
    with pytest.raises(UsageError, match="temperature"):
        engine.add_request(request)
    again = engine.prepare("r", PROMPT, SamplingParams(max_tokens=2))
    engine.add_request(again)
    with pytest.raises(UsageError, match="'r' is running"):
        engine.add_request(engine.prepare("r", PROMPT))
    assert len(engine._core._sequences) == 1
    engine.abort_all()
    with pytest.raises(UsageError, match="started before"):
        engine.add_request(again)
    assert not engine.has_unfinished_requests()


def test_a_step_that_fails_is_an_error_of_its_requests(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(engine, PROMPT, **GREEDY)

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ReferenceExecutor, "_run_node", fail)
    found = answer(engine, PROMPT, **GREEDY)
    assert found.finish_reason == "error" and "RuntimeError: no kernel" in (found.error or "")
    monkeypatch.undo()
    assert ids(engine, PROMPT, **GREEDY) == expected


def test_an_engine_does_not_survive_a_fork(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = engine.prepare("r", PROMPT, SamplingParams(**GREEDY))
    closed: list[object] = []
    monkeypatch.setattr(engine._executor, "close", lambda: closed.append(0))
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(EngineDeadError, match="forked"):
        engine.prepare("s", PROMPT)
    with pytest.raises(EngineDeadError, match="forked"):
        engine.add_request(request)
    engine.close()
    assert not closed, "what it holds is the parent's"
    monkeypatch.undo()
    engine.add_request(request)
    engine.abort_all()


def test_an_engine_that_was_closed(engine: LLMEngine) -> None:
    """Its memory is freed: nothing runs on it any more, and no process of grammars is started anew."""
    request = engine.prepare("r", PROMPT, SamplingParams(**GREEDY))
    for _ in range(2):
        engine.close()
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.prepare("s", PROMPT, SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.add_request(request)
    assert not engine.has_work()


def test_a_wrong_schema_is_refused_at_once(engine: LLMEngine) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "nothing"}))
    with pytest.raises(UsageError, match=r"structured_outputs\.json"):
        engine.prepare("r", PROMPT, params)


def test_non_finite_logits_are_an_error(directory: Path) -> None:
    """S8: of that request, not of the engine."""
    executor = ReferenceExecutor.open(directory)
    executor._weights["head.norm"] = executor._weights["head.norm"] * torch.nan
    engine = LLMEngine(EngineCore(executor), executor, Tokenizer(directory))
    for _ in range(2):
        found = answer(engine, PROMPT, **GREEDY)
        assert found.finish_reason == "error" and "not finite" in (found.error or "")


def test_torch_is_imported_by_the_reference_executor_only() -> None:
    """The GPU path has no torch."""
    modules = "flint_runtime.llm, flint_runtime.async_llm, flint_runtime.executors.plugin_host"
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_queue_time_ends_with_the_first_step(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Two of three requests run at once; the third waits until one of them is done."""
    requests = [engine.prepare(name, PROMPT, SamplingParams(**GREEDY)) for name in "abc"]
    with caplog.at_level(logging.INFO, logger="flint_runtime"):
        for request in requests:
            request.choices[0].arrival = requests[0].choices[0].arrival  # Times below are since then.
            engine.add_request(request)
        while engine.has_unfinished_requests():
            engine.step()
    first, second, third = (json.loads(record.message) for record in caplog.records)
    assert all(0 <= early["queue_time"] < early["time_to_first_token"] for early in (first, second))
    assert first["duration"] <= third["queue_time"] < third["time_to_first_token"]
    assert engine.metrics.request_queue_time_seconds.count == 3
