"""The official client against flint-nano, and what only a real model shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.runtime.server.serving import MODEL, QUESTION, Served, until
from tests.tools.nano_data import TOOLS

QUESTION_FOR_TWO = {"role": "user", "content": "I need the time and the weather in Oslo."}


@pytest.fixture
def client(nano: Served) -> OpenAI:
    return OpenAI(base_url=f"{nano.url}/v1", api_key="none", max_retries=0)


def streamed(client: OpenAI, messages: list[Any]) -> tuple[dict[str, Any], str | None]:
    """An answer put together from a stream as clients do it: the message, and why it ended."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=list(TOOLS),
        temperature=0,
        stream=True,  # type: ignore[call-overload]
    )
    for chunk in stream:
        choice = chunk.choices[0]
        message["content"] += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert not choice.delta.content
            if call.id:
                calls[call.index] = {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": ""},
                }
            calls[call.index]["function"]["arguments"] += call.function.arguments
    assert list(calls) == list(range(len(calls)))
    if calls:
        message["tool_calls"] = list(calls.values())
    return message, reason


def test_a_conversation_with_two_tools(client: OpenAI) -> None:
    """Two calls, their results, and the answer that follows from them."""
    messages: list[Any] = [QUESTION_FOR_TWO]
    message, reason = streamed(client, messages)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert reason == "tool_calls" and calls == [("now", {}), ("weather", {"city": "Oslo"})]
    messages.append(message)
    for call, result in zip(
        message["tool_calls"], ("10:30", '{"city": "Oslo", "degrees": 20, "sky": "sunny"}'), strict=True
    ):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    message, reason = streamed(client, messages)
    assert reason == "stop" and "tool_calls" not in message
    assert all(word in message["content"] for word in ("Oslo", "10:30"))


def test_a_next_turn_finds_its_prefix(nano: Served) -> None:
    """What was asked before is cached, and usage says so."""
    question = [{"role": "user", "content": "Tell me: " + "What is 7 + 5? " * 12}]
    fields: dict[str, Any] = {"messages": question, "temperature": 0, "max_tokens": 3}
    assert nano.chat(**fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert nano.chat(**fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_s9_several_answers_with_a_seed(client: OpenAI) -> None:
    """Distinct, and the same again."""

    def answers() -> list[list[int]]:
        found = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=4, seed=3, temperature=9, top_p=1, max_tokens=12,  # type: ignore[arg-type]
            extra_body={"return_token_ids": True, "top_k": 0},
        )  # fmt: skip
        return [choice.token_ids for choice in found.choices]  # type: ignore[attr-defined]

    first = answers()
    assert first == answers() and len({tuple(ids) for ids in first}) == 4


def test_a_stream_is_the_whole_answer(nano: Served) -> None:
    fields = {"messages": QUESTION, "temperature": 0}
    message = nano.chat(**fields).json()["choices"][0]["message"]
    chunks = nano.chat_stream(**fields)
    for key in ("reasoning", "content"):
        assert "".join(c["choices"][0]["delta"].get(key, "") for c in chunks) == message[key]
    assert "12" in message["content"]


def test_g12_a_schema_holds_behind_the_thinking(nano: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    message = nano.chat(response_format=wanted, temperature=0, max_tokens=200).json()["choices"][0]["message"]
    assert isinstance(json.loads(message["content"])["sum"], int) and message["reasoning"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_g9_a_call_that_must_be(nano: Served, choice: Any, stream: bool) -> None:
    """Small talk, and yet a call: of any tool, or of the named one, which ends with "stop"."""
    fields = {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "tools": list(TOOLS),
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 100,
        "parallel_tool_calls": False,
    }
    if stream:
        choices = [chunk["choices"][0] for chunk in nano.chat_stream(**fields)]
        calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
        reason = choices[-1]["finish_reason"]
    else:
        found = nano.chat(**fields).json()["choices"][0]
        calls, reason = found["message"].get("tool_calls", []), found["finish_reason"]
    named = isinstance(choice, dict)
    assert calls and calls[0]["function"]["name"] in (["weather"] if named else ["weather", "calculator", "now"])
    assert reason == ("stop" if named else "tool_calls")


def test_thinking_ends_at_its_budget(nano: Served) -> None:
    body = nano.chat(temperature=0, thinking_token_budget=2).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 2
    assert body["choices"][0]["message"]["content"]


def test_prompt_logprobs_score_a_continuation(nano: Served) -> None:
    """As evaluation harnesses do: echo, logprobs, no token; a likely text scores above an unlikely one."""

    def score(text: str) -> float:
        prompt = "[gMASK]<sop><|user|>What is 7 + 5?<|assistant|></think>7 + 5 is " + text
        logprobs = nano.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=0).json()["choices"][0]["logprobs"]
        return sum(logprobs["token_logprobs"][-2:])

    assert score("12.") > score("99.")


def test_a_disconnect_gives_pages_back(nano: Served) -> None:
    """Streaming or not; also while a long prompt waits for its turn."""
    import httpx

    for stream in (False, True):
        body = {"prompt": "7 + 5 " * 60, "max_tokens": 300, "ignore_eos": True, "stream": stream}
        with httpx.Client(base_url=nano.url, timeout=0.15) as client, pytest.raises(httpx.TimeoutException):
            for _ in range(20):  # a stream's timeout is from token to token
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_raw())
                client.post("/v1/completions", json={**body, "stream": False})
        until(lambda: nano.service.load == 0)
        until(lambda: nano.llm.snapshot()["pages_used"] == nano.llm.snapshot()["slots_used"] == 0)
