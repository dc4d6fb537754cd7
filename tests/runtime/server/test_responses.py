"""/v1/responses: what is asked of the chat, and what comes back, over a core that answers from a script."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from flint_runtime.server.errors import ApiError
from flint_runtime.server.protocol import common
from tests.runtime.fake_core import TOKENIZER, FakeCore
from tests.runtime.server.anthropic_stream import named_events
from tests.runtime.server.serving import MODEL, Served, endless, says, until
from tests.runtime.server.test_refusals import check

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather in a city",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = (
    "Two cities.</think><tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed")


def ask(server: Served, **fields: Any) -> httpx.Response:
    """POST /v1/responses."""
    return server.client.post("/v1/responses", json={"input": "What is 7 + 5?", **fields})


def streamed(server: Served, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """The response of a stream, and the names of its events, after checking their order and their form."""
    events = [data for _, data in named_events(server, "/v1/responses", {"input": "What is 7 + 5?", **fields})]
    return response_of(events), [event["type"] for event in events]


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last state of a response, after checking that its events lead there."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)
    names = [event["type"] for event in events]
    assert names[:2] == ["response.created", "response.in_progress"] and [n for n in names if n in ENDS] == names[-1:]
    items: list[dict[str, Any]] = []
    is_open, text = False, ""
    for event in events[2:-1]:
        name = event["type"]
        if name == "response.output_item.added":
            assert not is_open and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            assert not event["item"].get("content") and not event["item"].get("arguments")
            is_open, text = True, ""
            items.append(event["item"])
            continue
        assert is_open and event["output_index"] == len(items) - 1
        if name == "response.output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1], is_open = event["item"], False
            content = event["item"].get("content", [{"text": event["item"].get("arguments")}])
            assert [part["text"] for part in content] == [text]
            continue
        assert event["item_id"] == items[-1]["id"]
        if name.endswith(".delta"):
            text += event["delta"]
        elif name.endswith("_text.done"):
            assert event["text"] == text
        elif name.endswith("arguments.done"):
            assert event["arguments"] == text
        else:
            assert name.startswith("response.content_part") and event["part"]["text"] == text
    last: dict[str, Any] = events[-1]["response"]
    assert not is_open and last["output"] == items and last["id"] == events[0]["response"]["id"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    return last


def prompt_of(server: Served, core: FakeCore, **fields: Any) -> str:
    """What the engine is asked."""
    prompts: list[list[int]] = []
    answer = core.answer
    core.answer = lambda request: prompts.append(list(request.prompt)) or answer(request)  # type: ignore[func-returns-value]
    response = ask(server, **fields)
    assert response.status_code == 200, response.text
    core.answer = answer
    return TOKENIZER.decode(prompts[0], skip_special_tokens=False)


def test_whole(server: Served) -> None:
    response = ask(server, metadata={"a": "b"}, instructions="Be brief.").json()
    Response.model_validate(response)
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "7 + 5 is 12."}] and reasoning["summary"] == []
    assert message["content"] == [{"type": "output_text", "text": "It is 12.", "annotations": [], "logprobs": []}]
    assert message["role"] == "assistant" and {item["status"] for item in response["output"]} == {"completed"}
    assert response["status"] == "completed" and response["error"] is response["incomplete_details"] is None
    assert (response["object"], response["model"], response["metadata"]) == ("response", MODEL, {"a": "b"})
    assert response["id"].startswith("resp_") and response["instructions"] == "Be brief."
    usage, answer = response["usage"], TOKENIZER.encode("7 + 5 is 12.</think>It is 12.")
    assert usage["output_tokens"] == len(answer) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == answer.index(TOKENIZER.thinking_end_id)  # type: ignore[arg-type]


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs every time."""
    found = {key: value for key, value in response.items() if key not in ("id", "created_at", "completed_at")}
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**found, "output": items}


@pytest.mark.parametrize("text", ["7 + 5 is 12.</think>It is 12.", CALLS, "</think>Hm.", "</think>", "A thought"])
def test_streamed(server: Served, core: FakeCore, text: str) -> None:
    """A stream leads to the whole answer."""
    core.answer = says(text)
    response, _ = streamed(server, tools=[WEATHER])
    assert without_names(response) == without_names(ask(server, tools=[WEATHER]).json())


def test_events_of_every_kind(server: Served, core: FakeCore) -> None:
    _, names = streamed(server)
    for name in (
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ):  # fmt: skip
        assert f"response.{name}" in names
    core.answer = says(CALLS)
    _, names = streamed(server, tools=[WEATHER])
    assert names.count("response.function_call_arguments.done") == 2
    assert "response.function_call_arguments.delta" in names and "response.output_text.delta" not in names


def test_calls(server: Served, core: FakeCore) -> None:
    core.answer = says(CALLS)
    response = ask(server, tools=[WEATHER]).json()
    Response.model_validate(response)
    calls = response["output"][1:]
    found = [(c["type"], c["name"], json.loads(c["arguments"])) for c in calls]
    assert found == [("function_call", "weather", {"city": city}) for city in ("Oslo", "Rome")]
    assert calls[0]["call_id"] != calls[1]["call_id"] and response["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_cuts_off(server: Served, stream: bool) -> None:
    """The item says so, too: at the first token, within the thought, within the text."""
    for most in (1, 3, len(TOKENIZER.encode("7 + 5 is 12.</think>It is"))):
        response = streamed(server, max_output_tokens=most)[0] if stream else ask(server, max_output_tokens=most).json()
        assert response["status"] == "incomplete" and response["output"][-1]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == most


def test_a_failure_in_mid_stream(server: Served, core: FakeCore) -> None:
    endless(core)
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        (place,) = server.service.places
        place._task.get_loop().call_soon_threadsafe(place.fail, ApiError(503, "It is over."))
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    failed = response_of(events)
    assert events[-1]["type"] == "response.failed" and failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "It is over."}


# --- What the model is asked ------------------------------------------------------------------------------------------


def test_a_whole_conversation(server: Served, core: FakeCore) -> None:
    """Items of one turn are one message of the assistant, and all items stay in their order."""
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Oslo and Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Two."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rainy"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
    ]
    prompt = prompt_of(server, core, instructions="Be brief.", input=items, tools=[WEATHER])
    place = 0
    for part in (
        "Be brief.", "Be kind.", "<|user|>Oslo and Rome?<|assistant|><think>Two.</think>Let me see.<tool_call>weather",
        "Oslo", "Rome", "<|observation|>", "sunny", "rainy", "<|assistant|></think><tool_call>apply_patch",
        "*** Begin", "Done.", "<|assistant|><think>",
    ):  # fmt: skip
        assert part in prompt[place:], part
        place = prompt.index(part, place) + len(part)


def test_options(server: Served, core: FakeCore) -> None:
    assert prompt_of(server, core, reasoning={"effort": "none"}).endswith("</think>")
    assert prompt_of(server, core, reasoning={"effort": "high", "summary": "auto"}).endswith("<think>")
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    for form in ({"type": "text"}, schema, {"type": "json_object"}):
        core.answer = says("</think>{}")
        assert ask(server, text={"format": form, "verbosity": "low"}).json()["text"]["format"] == form
    assert "weather" in prompt_of(server, core, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})


def test_tools_that_are_no_functions_are_skipped(
    server: Served, core: FakeCore, caplog: pytest.LogCaptureFixture
) -> None:
    common._logged.discard("local_shell")
    for _ in range(2):
        tools: list[Any] = [{"type": "local_shell"}, WEATHER, {"type": "custom", "name": "patch", "format": {}}]
        prompt = prompt_of(server, core, tools=tools, tool_choice="auto")
        assert "local_shell" not in prompt and "patch" not in prompt and "weather" in prompt
    assert caplog.text.count("local_shell") == 1
    assert ask(server, tools=[{"type": "web_search"}], tool_choice="auto").status_code == 200


def test_reasoning_that_is_sealed(server: Served, core: FakeCore) -> None:
    """A client that keeps nothing else gives the thought back, and the prompt has it."""
    core.answer = says(CALLS)
    response = ask(server, tools=[WEATHER], include=["reasoning.encrypted_content"], store=False).json()
    sealed = response["output"][0]["encrypted_content"]
    items: list[Any] = [
        {"role": "user", "content": "Oslo?"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed},
        *response["output"][1:2],
        {"type": "function_call_output", "call_id": response["output"][1]["call_id"], "output": "sunny"},
    ]
    assert "<think>Two cities.</think><tool_call>weather" in prompt_of(server, core, input=items, tools=[WEATHER])
    items[1] = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA of another service"}
    assert "<|assistant|></think><tool_call>weather" in prompt_of(server, core, input=items, tools=[WEATHER])


# --- Responses that are kept ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(server: Served, core: FakeCore, stream: bool) -> None:
    """Over two responses; instructions are not taken along. The first one may be deleted."""
    core.answer = says(CALLS)
    fields: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be brief."}
    first = streamed(server, **fields)[0] if stream else ask(server, **fields).json()
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in first["output"][1:]
    ]
    core.answer = says("Fine.</think>It is sunny.")
    second = ask(server, input=outputs, previous_response_id=first["id"], tools=[WEATHER]).json()
    assert second["previous_response_id"] == first["id"]
    assert server.client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    prompt = prompt_of(server, core, input="And?", previous_response_id=second["id"], tools=[WEATHER])
    assert "Be brief." not in prompt
    assert prompt.endswith("sunny</tool_response><|assistant|></think>It is sunny.<|user|>And?<|assistant|><think>")
    check(ask(server, previous_response_id=first["id"]), 404, "previous_response_id")


def test_get_and_delete(server: Served) -> None:
    for response in (ask(server).json(), streamed(server)[0], ask(server, max_output_tokens=2).json()):
        path = f"/v1/responses/{response['id']}"
        assert server.client.get(path).json() == response
        check(server.client.post(path + "/cancel"), 400, "response_id")
        check(server.client.get(path, params={"stream": "true"}), 400, "stream")
        assert server.client.delete(path).json() == {"id": response["id"], "object": "response", "deleted": True}
        for found in (server.client.get(path), server.client.delete(path), server.client.post(path + "/cancel")):
            check(found, 404, "response_id")


def test_what_is_not_stored(server: Served) -> None:
    response = ask(server, store=False).json()
    assert response["store"] is False
    check(server.client.get(f"/v1/responses/{response['id']}"), 404, "response_id")
    check(ask(server, previous_response_id=response["id"]), 404, "previous_response_id")
    check(ask(server, previous_response_id="chat_1"), 400, "previous_response_id")
    check(server.client.get("/v1/responses/other"), 400, "response_id")


@pytest.mark.parametrize("store", [True, False])
def test_cancel(server: Served, core: FakeCore, store: bool) -> None:
    """The engine's request ends at once, the stream ends well, and the response stays as it was cancelled."""
    endless(core)
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True, "store": store}) as found:
        lines = (line for line in found.iter_lines() if line.startswith("data: "))
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(6)]
        path = f"/v1/responses/{events[0]['response']['id']}"
        if store:
            assert server.client.get(path).json()["status"] == "in_progress"
            check(server.client.delete(path), 400, "response_id")
        else:
            check(server.client.get(path), 404, "response_id")
        cancelled = server.client.post(path + "/cancel").json()
        events += [json.loads(line.removeprefix("data: ")) for line in lines]
    last = response_of(events)
    assert last == cancelled and last["status"] == "cancelled" and last["output"][-1]["status"] == "incomplete"
    until(lambda: not core.running and not server.service.places)
    if store:
        assert server.client.get(path).json() == cancelled == server.client.post(path + "/cancel").json()
    else:
        check(server.client.post(path + "/cancel"), 404, "response_id")


def test_a_client_that_leaves(server: Served, core: FakeCore) -> None:
    """Its response is gone with it."""
    endless(core)
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data: "))
    path = f"/v1/responses/{json.loads(first.removeprefix('data: '))['response']['id']}"
    until(lambda: not core.running and not server.service.places)
    until(lambda: server.client.get(path).status_code == 404)


# --- Refused ----------------------------------------------------------------------------------------------------------

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "x"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "flint-reasoning:?"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, None),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"truncation": "some"}, "truncation"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_wrong_fields(server: Served, fields: dict[str, Any], param: str | None) -> None:
    check(ask(server, **fields), 400, param)
    assert ask(server).status_code == 200


@pytest.mark.parametrize("levels", [100, 300, 1000, 100_000])
def test_nested_deeply(server: Served, levels: int) -> None:
    """Wherever it is: refused or not, it is no fault of the server's."""
    deep = "[" * levels + "]" * levels
    schema = f'{{"type": "json_schema", "name": "x", "schema": {{"enum": {deep}}}}}'
    for fields in (
        f'"metadata": {deep}',
        f'"text": {{"format": {schema}}}',
        f'"tools": [{{"type": "function", "name": "x", "y": {deep}}}]',
        f'"tool_choice": {{"type": "function", "name": {deep}}}',
    ):
        for stream in ("true", "false"):
            response = server.client.post("/v1/responses", content=f'{{"input": "Hi", "stream": {stream}, {fields}}}')
            assert response.status_code in (200, 400), response.text
    body = f'{{"input": [{{"role": "user", "content": "Hi", "x": {deep}}}]}}'
    assert server.client.post("/v1/responses", content=body).status_code in (200, 400)


@pytest.mark.parametrize("by_limit", [True, False])
def test_a_call_that_is_cut_off(server: Served, core: FakeCore, by_limit: bool) -> None:
    """By the limit or by a stop text: the arguments stay unfinished in both modes, and nothing says they are not."""
    core.answer = says(CALLS)
    most = len(TOKENIZER.encode(CALLS.partition("slo")[0]))
    limits: dict[str, Any] = {"max_output_tokens": most} if by_limit else {"stop": ["lo"]}
    streamed_one, _ = streamed(server, tools=[WEATHER], **limits)
    whole = ask(server, tools=[WEATHER], **limits).json()
    for response in (streamed_one, whole):
        call = response["output"][-1]
        assert call["arguments"] == ('{"city": "Oslo' if by_limit else '{"city": "Os')
        assert call["status"] == response["status"] == "incomplete"
    assert without_names(streamed_one) == without_names(whole)


def test_other_refusals(server: Served) -> None:
    check(server.client.post("/v1/responses", content=b"{"), 400)
    check(ask(server, model="gpt-5"), 404, "model")
    check(ask(server, input="word " * 5000), 400)
