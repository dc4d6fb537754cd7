"""/v1/messages: what is asked of the chat, and what comes back, over a core that answers from a script."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from flint_runtime.chat.events import CallArguments, CallEnd, CallStart
from flint_runtime.outputs import CompletionOutput
from flint_runtime.request import EngineRequest
from flint_runtime.server.errors import ApiError
from flint_runtime.server.generation import Batch, Piece, Usage
from flint_runtime.server.messages_format import MessagesFormat
from flint_runtime.server.protocol import common
from tests.runtime.fake_core import TOKENIZER, FakeCore
from tests.runtime.server.anthropic_stream import WEATHER, message_of, named_events
from tests.runtime.server.serving import MODEL, Served, endless, says, serving

QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]
CALLS = (
    "Two cities.</think><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
)


def ask(server: Served, **fields: Any) -> httpx.Response:
    """POST /v1/messages."""
    return server.client.post("/v1/messages?beta=true", json={"messages": QUESTION, "max_tokens": 900, **fields})


def streamed(server: Served, **fields: Any) -> dict[str, Any]:
    """The message of a stream."""
    return message_of(named_events(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 900, **fields}))


def prompt_of(server: Served, core: FakeCore, **fields: Any) -> str:
    """What the engine is asked; count_tokens counts the same."""
    prompts: list[list[int]] = []
    answer = core.answer
    core.answer = lambda request: prompts.append(list(request.prompt)) or answer(request)  # type: ignore[func-returns-value]
    response = ask(server, **fields)
    assert response.status_code == 200, response.text
    counted = server.client.post("/v1/messages/count_tokens", json={"messages": QUESTION, **fields})
    assert counted.json() == {"input_tokens": len(prompts[0])}
    return TOKENIZER.decode(prompts[0], skip_special_tokens=False)


def check(response: httpx.Response, status: int, kind: str, param: str | None = None) -> str:
    """An error of Anthropic's shape; its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message", "param"} and body["error"]["type"] == kind
    if param is not None:
        assert body["error"]["param"] == param, body
    message: str = body["error"]["message"]
    assert message
    return message


def test_whole(server: Served) -> None:
    message = ask(server).json()
    signature = message["content"][0].pop("signature")
    assert signature and message["content"] == [
        {"type": "thinking", "thinking": "7 + 5 is 12."},
        {"type": "text", "text": "It is 12."},
    ]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["id"].startswith("msg_")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage, answer = message["usage"], TOKENIZER.encode("7 + 5 is 12.</think>It is 12.")
    assert usage["output_tokens"] == len(answer) + 1 and usage["input_tokens"] > 5
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens_details"]["thinking_tokens"] == answer.index(TOKENIZER.thinking_end_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["7 + 5 is 12.</think>It is 12.", CALLS, "</think>Hm.", "</think>", "A thought"])
def test_streamed(server: Served, core: FakeCore, text: str) -> None:
    """A stream has the blocks, reasons and numbers of the whole answer."""
    core.answer = says(text)
    messages = [streamed(server, tools=[WEATHER]), ask(server, tools=[WEATHER]).json()]
    for message in messages:
        message.pop("id")
        for block in message["content"]:
            assert (block.pop("id", "x") and block.pop("signature", "x")) != ""
    assert messages[0] == messages[1]


def test_start_says_what_the_prompt_costs(server: Served) -> None:
    name, data = named_events(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 9})[0]
    assert name == "message_start" and data["message"]["usage"]["input_tokens"] > 5
    assert data["message"]["usage"]["output_tokens"] >= 1


def test_calls(server: Served, core: FakeCore) -> None:
    core.answer = says(CALLS)
    message = ask(server, tools=[WEATHER]).json()
    calls = message["content"][1:]
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [
        ("tool_use", "weather", {"city": "Oslo"}),
        ("tool_use", "weather", {"city": "Rome"}),
    ]
    assert message["stop_reason"] == "tool_use" and calls[0]["id"] != calls[1]["id"]


def test_a_call_is_complete_as_soon_as_it_is(server: Served, core: FakeCore) -> None:
    """Its block is closed before the next one is known of, so that a client can act."""
    core.answer = says(CALLS)
    names = [
        n
        for n, _ in named_events(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 900, "tools": [WEATHER]})
    ]
    stops = [i for i, name in enumerate(names) if name == "content_block_stop"]
    assert len(stops) == 3 and names[stops[1] + 1] == "content_block_start"


@pytest.mark.parametrize("by_limit", [True, False])
def test_a_call_that_is_cut_off(server: Served, core: FakeCore, by_limit: bool) -> None:
    """By the limit or by a stop text: no half value, its text is never closed, and the reason is the limit."""
    core.answer = says(CALLS)
    most = len(TOKENIZER.encode(CALLS.partition("slo")[0]))
    limits = {"max_tokens": most} if by_limit else {"max_tokens": 900, "stop_sequences": ["lo"]}
    message = ask(server, tools=[WEATHER], **limits).json()
    call = message["content"][-1]
    assert message["stop_reason"] == "max_tokens" and (call["type"], call["input"]) == ("tool_use", {})
    events = named_events(server, "/v1/messages", {"messages": QUESTION, "tools": [WEATHER], **limits})
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    text = "".join(delta.get("partial_json", "") for delta in deltas)
    assert text == ('{"city": "Oslo' if by_limit else '{"city": "Os')
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-3][0] == "content_block_stop"


def test_numbers_of_any_size(server: Served) -> None:
    """Arguments come back as they stand."""
    generation = SimpleNamespace(parsers=[None], usage=Usage(), is_cut_off=lambda piece: False)
    form = MessagesFormat(generation, message_id="m", model="x", shows_thinking=True)  # type: ignore[arg-type]
    events = [CallStart(0, "c", "add"), CallArguments(0, '{"n": 12345678901234567890123}'), CallEnd(0)]
    output = CompletionOutput(0, "", [1], 0.0, finish_reason="stop")
    batch = Batch(0, None, [Piece(0, events, output)])  # type: ignore[arg-type]
    assert b'"input":{"n": 12345678901234567890123}' in form.whole([batch])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(server: Served, core: FakeCore, stream: bool) -> None:
    def reason(**fields: Any) -> tuple[str, str | None]:
        message = streamed(server, **fields) if stream else ask(server, **fields).json()
        return message["stop_reason"], message["stop_sequence"]

    assert reason(max_tokens=2) == ("max_tokens", None)
    assert reason(stop_sequences=["12"]) == ("stop_sequence", "12")
    assert reason() == ("end_turn", None)


def test_thinking_can_be_hidden(server: Served) -> None:
    for message in (
        streamed(server, thinking={"type": "adaptive", "display": "omitted"}),
        ask(server, thinking={"type": "adaptive", "display": "omitted"}).json(),
    ):
        thought, said = message["content"]
        assert thought["thinking"] == "" and thought["signature"] and said["text"] == "It is 12."


def test_pings(core: FakeCore, shared: tuple[FakeCore, Served]) -> None:
    """A stream that is silent says so in the API's own words."""
    core.before_step = lambda: time.sleep(0.3)
    core.answer = says("</think>It")
    with serving(shared[1].llm, idle_seconds=0.1) as server:
        events = named_events(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 900})
    assert ("ping", {"type": "ping"}) in events and message_of(events)["content"][0]["text"] == "It"


def test_a_failure_in_mid_stream(server: Served, core: FakeCore) -> None:
    endless(core)
    body = {"messages": QUESTION, "max_tokens": 900, "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        (place,) = server.service.places
        place._task.get_loop().call_soon_threadsafe(place.fail, ApiError(503, "It is over."))
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert data[-1]["type"] == "error" and data[-1]["error"]["message"] == "It is over."
    assert data[-1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in [one["type"] for one in data]


# --- What the model is asked ------------------------------------------------------------------------------------------


def test_a_whole_conversation(server: Served, core: FakeCore) -> None:
    """Thoughts, calls, results as text, as blocks and failed, and text behind them: all in order."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Oslo "}, {"type": "text", "text": "and Rome?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two.", "signature": "x"},
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "rainy"}]},
                {"type": "tool_result", "tool_use_id": "c", "content": "no city", "is_error": True},
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "And?"},
    ]
    prompt = prompt_of(
        server, core, system=[{"type": "text", "text": "Be brief."}], messages=messages, tools=[WEATHER],
    )  # fmt: skip
    parts = ["Be brief.", "Oslo and Rome?", "Let me see.", "Oslo", "Rome", "sunny", "rainy", "Error: no city", "Well?"]
    place = 0
    for part in [*parts, "Be kind.", "And?"]:
        place = prompt.index(part, place) + len(part)
    assert "secret" not in prompt and "ephemeral" not in prompt and prompt.endswith("<|assistant|><think>")


def test_tools_stand_in_the_prompt_as_functions(server: Served, core: FakeCore) -> None:
    tool = {**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}
    prompt = prompt_of(server, core, tools=[tool])
    assert (
        json.dumps({"name": "weather", "description": "Weather in a city", "parameters": WEATHER["input_schema"]})
        in prompt
    )


def test_tools_that_are_no_functions_are_skipped(
    server: Served, core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    common._logged.discard("web_search_20250305")
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, WEATHER]
    for _ in range(2):
        assert "web_search" not in prompt_of(server, core, tools=tools)
    assert caplog.text.count("web_search_20250305") == 1
    assert ask(server, tools=tools[:1], tool_choice={"type": "auto"}).status_code == 200


@pytest.mark.parametrize(
    "system",
    [
        [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=%s;"},
            {"type": "text", "text": "Be brief."},
        ],
        [{"type": "text", "text": "x-anthropic-billing-header: cch=%s\nBe brief."}],
        "x-anthropic-billing-header: cch=%s\nBe brief.",
    ],
)  # fmt: skip
def test_the_billing_header_is_dropped(server: Served, core: FakeCore, system: Any) -> None:
    def prompt(number: str) -> str:
        return prompt_of(server, core, system=json.loads(json.dumps(system).replace("%s", number)))

    assert prompt("111") == prompt("222") and "Be brief." in prompt("1") and "billing" not in prompt("1")


def test_other_headers_stay(server: Served, core: FakeCore) -> None:
    """Only the first block is Claude Code's."""
    text = "x-anthropic-billing-header: is a header"
    assert text in prompt_of(server, core, messages=[{"role": "user", "content": text}])
    assert text in prompt_of(server, core, system=[{"type": "text", "text": "A."}, {"type": "text", "text": text}])


@pytest.mark.parametrize(
    ("thinking", "is_open"),
    [
        (None, True),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)  # fmt: skip
def test_thinking(server: Served, core: FakeCore, thinking: Any, is_open: bool) -> None:
    prompt = prompt_of(server, core, thinking=thinking)
    assert prompt.endswith("<think>" if is_open else "</think>")


def test_parameters_reach_the_engine(server: Served, core: FakeCore) -> None:
    seen: list[EngineRequest] = []
    answer = core.answer
    core.answer = lambda request: seen.append(request) or answer(request)  # type: ignore[func-returns-value]
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "max_tokens": 20}
    assert ask(server, **fields, thinking={"type": "enabled", "budget_tokens": 11}).status_code == 200
    params = seen[0].params
    assert {name: getattr(params, name) for name in fields} == fields and params.thinking_token_budget == 11
    assert ask(server, thinking={"type": "disabled", "budget_tokens": 11}).status_code == 200
    assert seen[1].params.thinking_token_budget is None


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_prompt_is_none(server: Served, core: FakeCore, system: Any) -> None:
    assert "<|system|>" not in prompt_of(server, core, system=system)


def test_an_answer_that_is_begun_goes_on(server: Served, core: FakeCore) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The answer is"}]
    core.answer = says(" 12.")
    prompt = prompt_of(server, core, messages=messages)
    assert prompt.endswith("The answer is")
    assert ask(server, messages=messages).json()["content"] == [{"type": "text", "text": " 12."}]


@pytest.mark.parametrize("model", ["claude-sonnet-4-5-20250929", "claude-3-5-haiku-latest", MODEL])
def test_names_of_claude(server: Served, model: str) -> None:
    assert ask(server, model=model).json()["model"] == model
    body = {"messages": QUESTION, "model": model}
    assert server.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 5


# --- Refused ----------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, None),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "x"}]}]}, None),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": 5}, None),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, None),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, None),
        ({"tool_choice": {"type": "any"}}, None),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"output_format": {"type": "xml"}}, "output_format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, None),
    ],
)  # fmt: skip
def test_wrong_fields(server: Served, fields: dict[str, Any], param: str | None) -> None:
    check(ask(server, **fields), 400, "invalid_request_error", param)
    if "max_tokens" not in fields and not {"temperature", "top_p", "stop_sequences"} & set(fields):
        body = {"messages": QUESTION, **fields}
        check(server.client.post("/v1/messages/count_tokens", json=body), 400, "invalid_request_error", param)
    assert ask(server).status_code == 200


def test_errors_have_anthropics_shape_everywhere(server: Served, shared: tuple[FakeCore, Served]) -> None:
    """Also before a request reaches its endpoint."""
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        check(server.client.post(path, content=b"{"), 400, "invalid_request_error")
        check(server.client.get(path), 405, "invalid_request_error")
        body = {"messages": QUESTION, "max_tokens": 5, "model": "gpt-4"}
        check(server.client.post(path, json=body), 404, "not_found_error", "model")
    check(ask(server, messages=[{"role": "user", "content": "word " * 5000}]), 400, "invalid_request_error")
    check(server.client.post("/v1/messages/batches", json={}), 404, "not_found_error")
    with serving(shared[1].llm, max_body_bytes=100) as small:
        check(ask(small, messages=[{"role": "user", "content": "x" * 200}]), 413, "request_too_large")


def test_either_key(shared: tuple[FakeCore, Served], core: FakeCore) -> None:
    with serving(shared[1].llm, api_keys=("secret",)) as server:
        body = {"messages": QUESTION, "max_tokens": 900}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            check(server.client.post(path, json=body), 401, "authentication_error")
            for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
                assert server.client.post(path, json=body, headers=headers).status_code == 200
