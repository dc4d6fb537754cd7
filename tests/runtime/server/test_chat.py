"""/v1/chat/completions: what comes back, streamed and whole, over a core that answers from a script."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from flint_runtime.request import EngineRequest
from flint_runtime.server.protocol import common
from flint_runtime.tokenizer import Tokenizer
from tests.runtime.fake_core import TOKENIZER, FakeCore
from tests.runtime.server.serving import MODEL, QUESTION, Served, says

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    "Two cities.</think><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
)


def joined(chunks: list[Any], key: str, index: int = 0) -> str:
    """A text of one answer's deltas."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def test_whole(server: Served) -> None:
    response = server.chat()
    body = response.json()
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "It is 12.",
                "reasoning": "7 + 5 is 12.",
                "reasoning_content": "7 + 5 is 12.",
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["object"] == "chat.completion" and body["model"] == MODEL and body["id"].startswith("chatcmpl-")
    usage, answer = body["usage"], TOKENIZER.encode("7 + 5 is 12.</think>It is 12.")
    assert usage["completion_tokens"] == len(answer) + 1  # the end token counts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == answer.index(TOKENIZER.thinking_end_id)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_streamed(server: Served) -> None:
    """Role first, then reasoning, then content, then the reason; all chunks share id, created and model."""
    chunks = server.chat_stream(stream_options={"include_usage": True})
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True)  # reasoning, then content
    whole = server.chat().json()
    message = whole["choices"][0]["message"]
    for key in ("content", "reasoning", "reasoning_content"):
        assert joined(chunks[:-1], key) == message[key]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_usage_in_every_chunk(server: Served) -> None:
    chunks = server.chat_stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == counts[-2] > 10


@pytest.mark.parametrize("stream", [False, True])
def test_calls(server: Served, core: FakeCore, stream: bool) -> None:
    core.answer = says(CALLS)
    if stream:
        chunks = server.chat_stream(tools=[WEATHER])
        deltas = [delta for c in chunks for delta in c["choices"][0]["delta"].get("tool_calls", ())]
        starts = [delta for delta in deltas if "id" in delta]
        assert all(d["type"] == "function" and d["function"]["arguments"] == "" for d in starts)
        # What comes later says nothing of the name: clients would take null for one.
        assert all(
            set(d) == {"index", "function"} and set(d["function"]) == {"arguments"} for d in deltas if d not in starts
        )
        arguments = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == i) for i in range(2)]
        found = [(start["function"]["name"], given) for start, given in zip(starts, arguments, strict=True)]
        reason, ids = chunks[-1]["choices"][0]["finish_reason"], [start["id"] for start in starts]
        assert not any("content" in c["choices"][0]["delta"] for c in chunks[1:])
    else:
        choice = server.chat(tools=[WEATHER]).json()["choices"][0]
        calls = choice["message"]["tool_calls"]
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        reason, ids = choice["finish_reason"], [call["id"] for call in calls]
        assert choice["message"]["content"] is None
    assert found == [("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')]
    assert reason == "tool_calls" and len(set(ids)) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [{"max_tokens": 15}, {"stop": ["slo"]}])
def test_g7_a_call_that_is_cut_off(server: Served, core: FakeCore, stream: bool, how: dict[str, Any]) -> None:
    """By the limit or by a stop text: the arguments stay unfinished, and the reason is the length, in both modes."""
    core.answer = says(CALLS)
    if stream:
        choices = [chunk["choices"][0] for chunk in server.chat_stream(tools=[WEATHER], **how)]
        calls = [call["function"] for c in choices for call in c["delta"].get("tool_calls", ())]
        reason = choices[-1]["finish_reason"]
    else:
        choice = server.chat(tools=[WEATHER], **how).json()["choices"][0]
        calls, reason = [call["function"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]
    assert reason == "length"
    assert "".join(call["arguments"] for call in calls).startswith('{"city": "') and len(calls) >= 1
    with pytest.raises(ValueError):
        json.loads("".join(call["arguments"] for call in calls))


def test_g8_no_call_where_none_may_be(server: Served, core: FakeCore) -> None:
    core.answer = says(CALLS)
    choice = server.chat(tools=[WEATHER], tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == CALLS.partition("</think>")[2]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


def test_g11_no_thinking(server: Served, core: FakeCore) -> None:
    core.answer = says("It is 12.")
    for how in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        body = server.chat(**how).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "It is 12."}
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_reasoning_can_be_left_out(server: Served) -> None:
    assert set(server.chat(include_reasoning=False).json()["choices"][0]["message"]) == {"role", "content"}
    chunks = server.chat_stream(include_reasoning=False)
    assert joined(chunks, "reasoning") == "" and joined(chunks, "content") == "It is 12."


def test_several_answers(server: Served) -> None:
    """n answers, streamed side by side: each is whole."""
    chunks = server.chat_stream(n=3)
    assert [joined(chunks, "content", index) for index in range(3)] == ["It is 12."] * 3
    body = server.chat(n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Served, stream: bool) -> None:
    """One entry for every token, the end included, with as many others as were asked for."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    if stream:
        chunks = server.chat_stream(**fields)
        choices = [chunk["choices"][0] for chunk in chunks]
        entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        tokens = [token for c in choices for token in c.get("token_ids", ())]
        prompt = chunks[0]["prompt_token_ids"]
    else:
        body = server.chat(**fields).json()
        entries, tokens = body["choices"][0]["logprobs"]["content"], body["choices"][0]["token_ids"]
        prompt = body["prompt_token_ids"]
    assert TOKENIZER.decode(prompt, skip_special_tokens=False).endswith("<|user|>What is 7 + 5?<|assistant|><think>")
    assert len(entries) == len(tokens) and TOKENIZER.decode(tokens[:-1]) == "7 + 5 is 12.</think>It is 12."
    assert all(len(entry["top_logprobs"]) == 1 and entry["logprob"] == -0.5 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).startswith(b"7 + 5 is 12.")


def test_x_request_id(server: Served) -> None:
    """It comes back as it came, is part of the answer's id, and may come twice at once."""
    response = server.client.post("/v1/chat/completions", json={"messages": QUESTION}, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine" and response.json()["id"] == "chatcmpl-mine"
    response = server.chat(request_id="of-the-body")
    assert response.headers["x-request-id"] == "of-the-body" and response.json()["id"] == "chatcmpl-of-the-body"
    first, second = server.chat().headers["x-request-id"], server.client.get("/version").headers["x-request-id"]
    assert first != second and len(first) == 32


def test_unknown_fields_are_logged_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    common._logged.discard("surprise")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert server.chat(surprise=1).status_code == 200
    assert caplog.text.count("'surprise'") == 1


def test_s5_stop_texts_hold_for_content(server: Served) -> None:
    """ "12" is in the thinking part, too, which it does not end."""
    body = server.chat(stop=["12"]).json()["choices"][0]
    assert body["message"]["reasoning"] == "7 + 5 is 12." and body["message"]["content"] == "It is "
    assert body["finish_reason"] == "stop" and body["stop_reason"] == "12"


@pytest.mark.parametrize("stop", ["is 1", " 12", "s 12.x", "It is 12. And"])
def test_s4_stop_texts_over_tokens(server: Served, stop: str) -> None:
    """They never show, and what only begins like one comes out whole."""
    text = "It is 12."
    chunks = server.chat_stream(stop=stop)
    assert joined(chunks, "content") == (text.partition(stop)[0] if stop in text else text)


def test_s6_values_that_mean_off(server: Served, core: FakeCore) -> None:
    seen: list[EngineRequest] = []
    answer = core.answer
    core.answer = lambda request: seen.append(request) or answer(request)  # type: ignore[func-returns-value]
    for fields in ({"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"temperature": 0}, {"seed": 2**63}, {"seed": 0}):
        assert server.chat(**fields).status_code == 200, fields
        ((name, value),) = fields.items()
        assert getattr(seen[-1].params, name) == value


def test_s12_omitted_fields_are_the_checkpoints(server: Served, core: FakeCore) -> None:
    seen: list[EngineRequest] = []
    answer = core.answer
    core.answer = lambda request: seen.append(request) or answer(request)  # type: ignore[func-returns-value]
    server.chat()
    params = seen[0].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.95, 20)
    assert seen[0].max_tokens == core.max_model_len - len(seen[0].prompt)


def test_a_prompt_can_be_cut(server: Served) -> None:
    whole = server.chat(return_token_ids=True).json()["prompt_token_ids"]
    for most in (5, -1):
        found = server.chat(truncate_prompt_tokens=most, return_token_ids=True).json()["prompt_token_ids"]
        assert found == (whole[-most:] if most > 0 else whole)


def test_long_prompts_leave_the_event_loop_free(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are read and prompts rendered in other threads."""
    import threading

    threads: set[str] = set()
    render = Tokenizer.render_chat

    def remember(self: Tokenizer, *arguments: Any, **named: Any) -> str:
        threads.add(threading.current_thread().name)
        return render(self, *arguments, **named)

    monkeypatch.setattr(Tokenizer, "render_chat", remember)
    server.chat()
    assert threads and all(name.startswith("flint-http") for name in threads)
