"""What requests return: text, tokens, logprobs, ends; and that every form of output says the same."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime.llm_engine import LLMEngine
from flint_runtime.outputs import CompletionOutput, Logprob, RequestOutput
from flint_runtime.request import CoreOutput, TokenOutput
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fake_core import EOS, TOKENIZER, FakeCore, echo, fake_engine


def run(engine: LLMEngine, prompt: str | list[int], **params: Any) -> list[RequestOutput]:
    """Every output of one request."""
    engine.add_request(engine.prepare("r", prompt, SamplingParams(**params)))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def answer(prompt: str | list[int], **params: Any) -> CompletionOutput:
    (output,) = run(fake_engine(FakeCore()), prompt, output_kind=RequestOutputKind.FINAL_ONLY, **params)
    assert output.finished
    return output.outputs[0]


def test_ends() -> None:
    ids = TOKENIZER.encode("Hello")
    found = answer("Hello")
    assert (found.text, found.token_ids, found.finish_reason, found.stop_reason) == ("Hello", [*ids, EOS], "stop", None)
    found = answer("Hello", max_tokens=len(ids))
    assert (found.text, found.token_ids, found.finish_reason, found.stop_reason) == ("Hello", ids, "length", None)
    found = answer("Hello", stop=["llo"])
    assert (found.text, found.finish_reason, found.stop_reason) == ("He", "stop", "llo")
    assert found.cumulative_logprob == -0.5 * len(found.token_ids)


def test_a_stop_token_is_in_the_text_only_if_asked_for() -> None:
    ids = TOKENIZER.encode("Paris, Rome")
    comma = TOKENIZER.encode(",")[0]
    assert comma in ids
    found = answer("Paris, Rome", stop_token_ids=[comma])
    assert (found.text, found.token_ids[-1], found.stop_reason) == ("Paris", comma, comma)
    assert answer("Paris, Rome", stop_token_ids=[comma], include_stop_str_in_output=True).text == "Paris,"
    assert answer("Hello", skip_special_tokens=False).text == "Hello"
    both = answer("Hello", skip_special_tokens=False, include_stop_str_in_output=True)
    assert both.text == "Hello" + TOKENIZER.decode([EOS], skip_special_tokens=False)


def test_an_end_without_a_stop_token_keeps_the_last_token() -> None:
    """As where a grammar allows nothing more."""
    core = FakeCore()
    engine = fake_engine(core)
    engine.add_request(engine.prepare("r", "x", SamplingParams()))
    core.step = lambda: [CoreOutput("r#0", (TokenOutput(TOKENIZER.encode("a")[0], -1.0),), "stop")]  # type: ignore[method-assign]
    found = engine.step()[0].outputs[0]
    assert (found.text, found.finish_reason, found.stop_reason) == ("a", "stop", None)


def test_a_stop_text_aborts_the_core() -> None:
    core = FakeCore()
    (*_, last) = run(fake_engine(core), "one two three", stop=["two"])
    assert last.outputs[0].text == "one " and core.aborted == ["r#0"] and not core.running


def test_logprobs() -> None:
    token = TOKENIZER.encode("a")[0]
    none = answer([token], max_tokens=1)
    assert none.logprobs is None
    own = Logprob(-0.5, 1, "a", b"a")
    assert answer([token], max_tokens=1, logprobs=0).logprobs == [{token: own}]
    assert answer([token], max_tokens=1, logprobs=2).logprobs == [
        {token: own, 1: Logprob(-2.0, 2, TOKENIZER.token_bytes(1).decode(), TOKENIZER.token_bytes(1))}
    ]


def test_a_logprob_has_the_bytes_of_a_part_of_a_character() -> None:
    """Of which a text has only U+FFFD."""
    ids = TOKENIZER.encode("👩")
    found = answer(ids, max_tokens=len(ids), logprobs=0)
    assert found.text == "👩" and found.logprobs is not None
    entries = [entry[token] for entry, token in zip(found.logprobs, ids, strict=True)]
    assert b"".join(entry.token_bytes for entry in entries).decode() == "👩"
    assert all("\ufffd" in (entry.decoded_token or "") for entry in entries)


def test_without_detokenize_there_is_no_text() -> None:
    ids = TOKENIZER.encode("Hello")
    for kind in RequestOutputKind:
        outputs = run(fake_engine(FakeCore()), "Hello", detokenize=False, logprobs=0, output_kind=kind)
        assert not any(choice.text for output in outputs for choice in output.outputs)
        last = outputs[-1].outputs[0]
        assert last.finish_reason == "stop" and last.token_ids[-1] == EOS
        if kind is not RequestOutputKind.DELTA:
            assert last.token_ids == [*ids, EOS] and last.logprobs is not None
            assert last.logprobs[0][ids[0]] == Logprob(-0.5, 1, None, TOKENIZER.token_bytes(ids[0]))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_marks_tell_a_marker_from_its_characters(kind: RequestOutputKind) -> None:
    (marker,) = TOKENIZER.encode("<tool_call>")
    broken = TOKENIZER.encode("é")[:1] if len(TOKENIZER.encode("é")) > 1 else TOKENIZER.encode("👩")[:1]
    spelled = [token for letter in "<tool_call>" for token in TOKENIZER.encode(letter)]
    ids = [*TOKENIZER.encode("a"), marker, *spelled, *broken, marker]
    outputs = [output.outputs[0] for output in run(fake_engine(FakeCore()), ids, output_kind=kind)]
    text = "".join(found.text for found in outputs) if kind is RequestOutputKind.DELTA else outputs[-1].text
    marks = (
        [mark for found in outputs for mark in found.marks] if kind is RequestOutputKind.DELTA else outputs[-1].marks
    )
    assert text == "a<tool_call><tool_call>\ufffd<tool_call>"
    assert marks == [(1, marker), (24, marker)]
    assert not any(found.marks for found in run_choices("abc", detokenize=False))


def run_choices(prompt: str | list[int], **params: Any) -> list[CompletionOutput]:
    return [output.outputs[0] for output in run(fake_engine(FakeCore()), prompt, **params)]


def test_a_stop_text_may_cut_a_marker_and_stays_as_it_was() -> None:
    """A mark does not change what a stop text finds: it lies, or ends, beyond what is left of the text."""
    (marker,) = TOKENIZER.encode("<tool_call>")
    ids = [*TOKENIZER.encode("ab"), marker, *TOKENIZER.encode("c")]
    for stop, left in (("<tool", "ab"), ("b<", "a"), ("call>", "ab<tool_"), (">c", "ab<tool_call")):
        found = answer(ids, stop=[stop])
        assert (found.text, found.stop_reason, found.marks) == (left, stop, [(2, marker)])


def test_finished_is_asked_for_as_in_vllm() -> None:
    outputs = run(fake_engine(FakeCore()), "ab")
    assert [output.outputs[0].finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize(("kind", "texts"), [
    (RequestOutputKind.CUMULATIVE, ["a", "ab", "abc", "abc"]),
    (RequestOutputKind.DELTA, ["a", "b", "c", ""]),
    (RequestOutputKind.FINAL_ONLY, ["abc"]),
])  # fmt: skip
def test_output_kinds(kind: RequestOutputKind, texts: list[str]) -> None:
    ids = [TOKENIZER.encode(character)[0] for character in "abc"]
    assert [output.outputs[0].text for output in run(fake_engine(FakeCore()), ids, output_kind=kind)] == texts


def test_prompt_logprobs_and_cached_tokens() -> None:
    core = FakeCore()
    engine = fake_engine(core)
    engine.add_request(engine.prepare("r", [5, 6], SamplingParams(prompt_logprobs=1)))
    core.step = lambda: [  # type: ignore[method-assign]
        CoreOutput(
            "r#0", (TokenOutput(7, -1.0),), "length",
            prompt_logprobs=(None, TokenOutput(6, -3.0, (8,), (-0.25,))), cached_tokens=1,
        )
    ]  # fmt: skip
    (output,) = engine.step()
    assert output.prompt_logprobs == [
        None,
        {
            6: Logprob(-3.0, None, TOKENIZER.token_bytes(6).decode(), TOKENIZER.token_bytes(6)),
            8: Logprob(-0.25, 1, TOKENIZER.token_bytes(8).decode(), TOKENIZER.token_bytes(8)),
        },
    ]
    assert output.num_cached_tokens == 1 and output.prompt is None and output.prompt_token_ids == [5, 6]


@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=20),
    stops=st.lists(st.text("abcde ", min_size=1, max_size=2), max_size=2),
    skip=st.booleans(),
    per_step=st.integers(1, 5),
    logprobs=st.sampled_from([None, 1]),
)
@settings(max_examples=200, deadline=None)
def test_every_form_of_output_says_the_same(
    ids: list[int], stops: list[str], skip: bool, per_step: int, logprobs: int | None
) -> None:
    """Concatenated deltas, the last cumulative output and the only final one; however many tokens a step brings."""
    params = {"stop": stops, "skip_special_tokens": skip, "logprobs": logprobs, "max_tokens": len(ids)}

    def outputs(kind: RequestOutputKind, tokens: int = per_step) -> list[RequestOutput]:
        return run(fake_engine(FakeCore(per_step=tokens)), ids, output_kind=kind, **params)

    final = outputs(RequestOutputKind.FINAL_ONLY)[0].outputs[0]
    assert outputs(RequestOutputKind.FINAL_ONLY, 1)[0].outputs[0] == final
    cumulative = [o.outputs[0] for o in outputs(RequestOutputKind.CUMULATIVE)]
    assert cumulative[-1] == final
    assert all(b.text.startswith(a.text) for a, b in pairwise(cumulative))
    deltas = [o.outputs[0] for o in outputs(RequestOutputKind.DELTA)]
    assert "".join(d.text for d in deltas) == final.text
    assert [t for d in deltas for t in d.token_ids] == final.token_ids
    assert final.logprobs is None or [p for d in deltas for p in d.logprobs or []] == final.logprobs
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (final.finish_reason, final.stop_reason)


def test_n_answers() -> None:
    """Each with its own seed and end; a delta has only those with something new."""
    core = FakeCore(lambda request: echo(request)[int(request.request_id[-1]) :])
    outputs = run(fake_engine(core), "abcd", n=3, seed=5, output_kind=RequestOutputKind.DELTA)
    texts = ["".join(c.text for o in outputs for c in o.outputs if c.index == i) for i in range(3)]
    assert texts == ["abcd", "bcd", "cd"]
    assert [[c.index for c in o.outputs] for o in outputs] == [[0, 1, 2]] * 3 + [[0, 1], [0]]
    assert [o.finished for o in outputs] == [False] * 4 + [True]
    (final,) = run(fake_engine(core), "abcd", n=3, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [c.text for c in final.outputs] == texts


def test_abort() -> None:
    core = FakeCore()
    engine = fake_engine(core)
    engine.add_request(engine.prepare("r", "Paris Rome", SamplingParams(n=2, stop=["isx"])))
    engine.step()
    output = engine.abort_request("r")
    assert output is not None and output.finished
    assert [(c.finish_reason, c.text) for c in output.outputs] == [("abort", "Paris")] * 2  # "is" was held
    assert core.aborted == ["r#0", "r#1"] and engine.abort_request("r") is None
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_an_error_ends_one_request() -> None:
    core = FakeCore()
    engine = fake_engine(core)
    for name in ("good", "bad"):
        engine.add_request(engine.prepare(name, "abc", SamplingParams()))
    first = engine.step()
    assert len(first) == 2
    del core.running["bad#0"]
    normal, core.step = core.step, lambda: [CoreOutput("bad#0", (), "error", "not finite")]  # type: ignore[method-assign]
    (output,) = engine.step()
    found = output.outputs[0]
    assert (found.text, found.finish_reason, found.error) == ("a", "error", "not finite") and output.finished
    core.step = normal  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        (last,) = engine.step()
    assert last.outputs[0].text == "abc"


def test_metrics_and_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine(FakeCore())
    with caplog.at_level(logging.INFO, logger="flint_runtime"):
        (*_, last) = run(engine, "abcd", n=2)
    record = json.loads(caplog.records[-1].message)
    assert record["event"] == "request_finished" and record["request_id"] == "r"
    assert record["finish_reasons"] == ["stop"] * 2
    assert (record["prompt_tokens"], record["generated_tokens"]) == (4, 10)
    assert 0 <= record["queue_time"] <= record["time_to_first_token"] <= record["duration"]
    found = engine.snapshot()
    assert (found["prompt_tokens"], found["generation_tokens"], found["running"]) == (4, 10, 0)
    assert found["request_success"] == {"stop": 2, "length": 0, "abort": 0, "error": 0}
    assert sum(found["time_to_first_token_seconds"]["counts"]) == 1
    assert sum(found["request_queue_time_seconds"]["counts"]) == 1
    assert sum(found["inter_token_latency_seconds"]["counts"]) == 8
    assert last.metrics is not None and last.metrics.first_token_time is not None
    assert last.metrics.arrival_time <= last.metrics.first_token_time


def test_s13_nothing_is_kept_of_a_finished_request() -> None:
    engine = fake_engine(FakeCore())
    for _ in range(3):
        run(engine, "Paris, Rome", n=2, stop=["Ro"])
    assert not engine._outputs._requests and not engine._outputs._choices
