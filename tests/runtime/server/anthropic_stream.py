"""What tests know of Anthropic's streams."""

from __future__ import annotations

import json
from typing import Any

from tests.runtime.server.serving import Served

WEATHER = {
    "name": "weather",
    "description": "Weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def named_events(server: Served, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of a stream, in order: name and data."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = response.read().decode()
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(data["type"] == name for name, data in found)
    return found


def message_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events are, after checking that they come in an order that the API has."""
    names = [name for name, _ in events if name != "ping"]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert not {"message_start", "message_delta", "message_stop"} & set(names[1:-2])
    message: dict[str, Any] = dict(events[[name for name, _ in events].index("message_start")][1]["message"])
    assert message["content"] == [] and message["stop_reason"] is None
    is_open, arguments = False, ""
    for name, data in events:
        if name.startswith("content_block"):
            assert data["index"] == len(message["content"]) - (name != "content_block_start")
        if name == "content_block_start":
            assert not is_open
            is_open, arguments = True, ""
            message["content"].append(dict(data["content_block"]))
        elif name == "content_block_delta":
            assert is_open
            delta = dict(data["delta"])
            kind = delta.pop("type")
            ((key, value),) = delta.items()
            block = message["content"][-1]
            allowed = {"text": ["text_delta"], "tool_use": ["input_json_delta"]}
            assert kind in allowed.get(block["type"], ["thinking_delta", "signature_delta"])
            if key == "partial_json":
                arguments += value
            else:
                block[key] += value
        elif name == "content_block_stop":
            assert is_open
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(arguments)
        elif name == "message_delta":
            assert not is_open
            message.update(data["delta"], usage=data["usage"])
    return message
