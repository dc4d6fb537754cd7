"""The official client, and requests as Claude Code sends them, against flint-nano."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.runtime.server.anthropic_stream import message_of, named_events
from tests.runtime.server.serving import Served
from tests.tools.nano_data import TOOLS

TOOLS_OF_CLAUDE: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
WEATHER_QUESTION = "What is the weather in Oslo and in Rome?"
RESULTS = ('{"city": "Oslo", "degrees": 20, "sky": "sunny"}', '{"city": "Rome", "degrees": 9, "sky": "rainy"}')
ANSWER = "In Oslo it is 20 degrees and sunny. In Rome it is 9 degrees and rainy."


@pytest.fixture
def client(nano: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=nano.url, api_key="none", max_retries=0)


def test_a_conversation_with_two_tools(client: anthropic.Anthropic) -> None:
    """Two calls, their results, and the answer that follows from them."""
    asked: Any = {
        "model": "claude-some-model",
        "max_tokens": 200,
        "tools": TOOLS_OF_CLAUDE,
        "extra_body": {"temperature": 0},
    }
    messages: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    with client.messages.stream(messages=messages, **asked) as stream:
        first = stream.get_final_message()
    assert first.content[0].type == "thinking" and first.content[0].signature
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [(c.name, c.input) for c in calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    assert first.stop_reason == "tool_use" and first.content[-1] == calls[-1]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": weather}]}
        for call, weather in zip(calls, RESULTS, strict=True)
    ]
    messages += [first.to_param(), {"role": "user", "content": results}]
    with client.messages.stream(messages=messages, **asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert last.stop_reason == "end_turn" and text == ANSWER
    usage = last.usage
    assert usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model="claude-x", messages=messages, tools=TOOLS_OF_CLAUDE)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_of_the_client(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="claude-x", max_tokens=5, messages=[], extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError, match="model"):
        client.messages.create(model="gpt-4", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])


def claude_code(number: int, messages: list[Any]) -> dict[str, Any]:
    """A request as Claude Code makes it: its header of the turn, cache marks, its own model name, options."""
    return {
        "model": "claude-opus-4-5-20251101",
        "messages": messages,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37.{number}; cch={number:05x};"},
            {
                "type": "text",
                "text": "You are Claude Code. Be brief. " * 5,
                "cache_control": {"type": "ephemeral"},
            },
        ],
        "tools": [*TOOLS_OF_CLAUDE, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 0,
    }


def test_claude_code_shares_its_prefix(nano: Served) -> None:
    """Two turns whose billing header differs; the first has a system message inside, a mark at its last block."""
    mark = {"cache_control": {"type": "ephemeral"}}
    first: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Hm.</system-reminder>"}]},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "What is 7 + 5?", **mark}]},
    ]
    body = claude_code(1, first)
    message = message_of(named_events(nano, "/v1/messages?beta=true", body))
    assert message["model"] == body["model"] and message["content"]
    asked = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    second = [*first[:2], {"role": "user", "content": [{"type": "text", "text": "What is 7 + 5?"}]}]
    second += [
        {"role": "assistant", "content": [{"type": "text", "text": "It is 12."}]},
        {"role": "user", "content": [{"type": "text", "text": "And 7 + 6?", **mark}]},
    ]
    usage = message_of(named_events(nano, "/v1/messages?beta=true", claude_code(2, second)))["usage"]
    assert usage["cache_read_input_tokens"] >= asked // 2
    assert usage["input_tokens"] < asked


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, ["weather"]),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather"]),
        ({"type": "tool", "name": "now"}, ["now"]),
        ({"type": "none"}, []),
    ],
)
def test_tool_choice(client: anthropic.Anthropic, choice: Any, names: list[str]) -> None:
    """The model would call weather twice."""
    message = client.messages.create(
        model="claude-x",
        max_tokens=60,
        messages=[{"role": "user", "content": WEATHER_QUESTION}],
        tools=TOOLS_OF_CLAUDE,
        tool_choice=choice,
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    )
    assert [block.name for block in message.content if block.type == "tool_use"] == names
    assert (message.stop_reason == "tool_use") == bool(names)
