"""The official client, and requests as Codex sends them, against flint-nano."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.runtime.server.anthropic_stream import named_events
from tests.runtime.server.serving import MODEL, Served
from tests.runtime.server.test_responses import response_of
from tests.tools.nano_data import TOOLS

TOOLS_OF_RESPONSES: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
WEATHER_QUESTION = "What is the weather in Oslo and in Rome?"
RESULTS = ('{"city": "Oslo", "degrees": 20, "sky": "sunny"}', '{"city": "Rome", "degrees": 9, "sky": "rainy"}')
ANSWER = "In Oslo it is 20 degrees and sunny. In Rome it is 9 degrees and rainy."
CALLS = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]


@pytest.fixture
def client(nano: Served) -> OpenAI:
    return OpenAI(base_url=f"{nano.url}/v1", api_key="none", max_retries=0)


def test_a_conversation_with_two_tools(client: OpenAI) -> None:
    """Two calls, their results, and the answer that follows from them; the server keeps the conversation."""
    asked: Any = {"model": MODEL, "tools": TOOLS_OF_RESPONSES, "temperature": 0}
    with client.responses.stream(input=WEATHER_QUESTION, **asked) as stream:
        first = stream.get_final_response()
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS and first.output[0].type == "reasoning"
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, RESULTS, strict=True)
    ]
    text = ""
    with client.responses.stream(input=outputs, previous_response_id=first.id, **asked) as stream:
        for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
        last = stream.get_final_response()
    assert text == last.output_text == ANSWER and last.status == "completed"
    assert last.usage and last.usage.input_tokens_details.cached_tokens >= 64
    assert client.responses.retrieve(last.id).output_text == ANSWER
    client.responses.delete(last.id)


def test_a_form_of_the_answer(client: OpenAI) -> None:
    class Sum(BaseModel):
        sum: int

    response = client.responses.parse(
        model=MODEL, input="What is 7 + 5?", text_format=Sum, temperature=0, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Sum)


def codex(items: list[Any]) -> dict[str, Any]:
    """A request as Codex makes it: nothing is stored, the whole history, tools of other kinds."""
    return {
        "model": MODEL,
        "instructions": "You are Codex.",
        "input": items,
        "tools": [
            *TOOLS_OF_RESPONSES,
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": True},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0197",
        "text": {"verbosity": "low"},
        "client_metadata": {"a": "b"},
        "temperature": 0,
    }


def test_codex(nano: Served) -> None:
    """Its second turn has the first one's items without ids and without the text of the reasoning: what was computed
    is found again, the reasoning included.
    """
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": WEATHER_QUESTION}]},
    ]
    first = response_of([data for _, data in named_events(nano, "/v1/responses", codex(items))])
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    for item in first["output"]:
        kept = {key: value for key, value in item.items() if key not in ("id", "status")}
        items.append({**kept, "content": None} if item["type"] == "reasoning" else kept)
    for call, result in zip(calls, RESULTS, strict=True):
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
    last = response_of([data for _, data in named_events(nano, "/v1/responses", codex(items))])
    assert last["status"] == "completed" and last["output"][-1]["content"][0]["text"] == ANSWER
    asked = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] >= asked - 64


def test_tool_choice(client: OpenAI) -> None:
    """The model would call weather twice."""
    named: Any = {"type": "function", "name": "now"}
    forced: list[tuple[Any, bool, str]] = [("required", False, "weather"), (named, True, "now")]
    for choice, parallel, name in forced:
        response = client.responses.create(
            model=MODEL,
            input=WEATHER_QUESTION,
            tools=TOOLS_OF_RESPONSES,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            reasoning={"effort": "none"},
            temperature=0,
            max_output_tokens=60,
        )
        assert [item.name for item in response.output if item.type == "function_call"] == [name]
