"""A request of the Responses API as one of /v1/chat/completions, which then goes the one way that all chats go.

Reasoning comes back from clients in one of two ways: as the text that it is, or, from those that keep nothing
else (Codex), as `encrypted_content`. That is no secret here: it is the text in base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from flint_runtime.errors import UsageError, shown
from flint_runtime.server.protocol.chat import ChatRequest
from flint_runtime.server.protocol.common import SamplingFields, log_once
from flint_runtime.server.protocol.responses import ResponsesRequest

_SEAL = "flint-reasoning:"
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts that are text, with the field that has it."""
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")

Message = dict[str, Any]


def chat_request(body: ResponsesRequest, earlier: Sequence[Any]) -> ChatRequest:
    """A request in the form of /v1/chat/completions. Raises UsageError.

    Args:
        earlier: items of the conversation that it goes on with.
    """
    conversation = _Conversation(body.instructions)
    for index, item in enumerate(earlier):
        conversation.add(f"previous_response_id[{index}]", item)
    for index, item in enumerate(input_items(body)):
        conversation.add(f"input[{index}]", item)
    if not conversation.messages:
        raise UsageError("input must have an item, found none.")
    tools = function_tools(body.tools)
    fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
    fields.update(
        messages=conversation.messages,
        tools=[_chat_tool(tool) for tool in tools],
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=body.max_output_tokens,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )
    if body.text and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


def input_items(body: ResponsesRequest) -> list[Any]:
    """The items that a request brings."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def function_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The tools that are functions. Others are skipped: OpenAI runs them, or has their format. Raises UsageError."""
    found = []
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise UsageError(
                f'tools[{index}] must be such as {{"type": "function", "name": "now", "parameters": {{}}}}, found '
                f"{shown(tool)}."
            )
        if kind == "function":
            found.append({name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None})
        else:
            log_once(kind, "Requests offer a tool that is no function, which this server skips: %s")
    return found


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


class _Conversation:
    """Messages of a chat, put together from items: the reasoning, text and calls of one turn are one message."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = []
        if instructions:
            self.messages.append({"role": "system", "content": instructions})
        self._turn: Message | None = None
        """The assistant's message that the next items may belong to."""

    def add(self, name: str, item: object) -> None:
        """Add an item. Raises UsageError."""
        if not isinstance(item, Mapping):
            raise UsageError(f'{name} must be such as {{"role": "user", "content": "Hi"}}, found {shown(item)}.')
        kind = item.get("type", "message")
        if kind == "message":
            self._message(name, item)
        elif kind == "reasoning":
            self._assistant("content", "tool_calls")["reasoning_content"] += _reasoning(name, item)
        elif kind in ("function_call", "custom_tool_call"):
            self._assistant().setdefault("tool_calls", []).append(_call(name, item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(f"{name}.output", item.get("output"))
            call_id = _string(f"{name}.call_id", item.get("call_id"))
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            self._turn = None
        else:
            raise UsageError(
                f"{name}.type must be message, reasoning, function_call or function_call_output; found {shown(kind)}."
            )

    def _message(self, name: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise UsageError(f"{name}.role must be user, assistant, system or developer; found {shown(role)}.")
        content = _content(f"{name}.content", item.get("content"))
        if role == "assistant":
            self._assistant("content")["content"] = content
        else:
            self.messages.append({"role": role, "content": content})
            self._turn = None

    def _assistant(self, *without: str) -> Message:
        """The assistant's message so far, or a new one where it has one of these."""
        if self._turn is None or any(self._turn.get(key) for key in without):
            self._turn = {"role": "assistant", "content": "", "reasoning_content": ""}
            self.messages.append(self._turn)
        return self._turn


def _content(name: str, content: object) -> str | list[dict[str, str]]:
    """A text, or text parts as a chat has them. Raises UsageError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError(f"{name} must be a text or a list of parts, found {shown(content)}.")
    found = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise UsageError(
                f'{name}[{index}] must be a text part, {{"type": "input_text", "text": "Hi"}}, found {shown(part)}. '
                "Flint reads text only."
            )
        key = _TEXT_PARTS[kind]
        found.append({"type": "text", "text": _string(f"{name}[{index}].{key}", part.get(key))})
    return found[0]["text"] if len(found) == 1 else found


def _reasoning(name: str, item: Mapping[str, Any]) -> str:
    content = _texts(f"{name}.content", item.get("content"))
    if content:
        return content
    encrypted = item.get("encrypted_content")
    if encrypted is not None and _string(f"{name}.encrypted_content", encrypted).startswith(_SEAL):
        try:
            return base64.b64decode(encrypted.removeprefix(_SEAL), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise UsageError(
                f"{name}.encrypted_content must be as it came from this server, found a damaged one."
            ) from None
    return _texts(f"{name}.summary", item.get("summary"))


def _texts(name: str, parts: object) -> str:
    if parts is None:
        return ""
    if (
        not isinstance(parts, Sequence)
        or isinstance(parts, str)
        or not all(isinstance(part, Mapping) for part in parts)
    ):
        raise UsageError(f"{name} must be a list of parts, found {shown(parts)}.")
    return "".join(_string(f"{name}[{index}].text", part.get("text")) for index, part in enumerate(parts))


def _call(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    if item["type"] == "function_call":
        arguments: Any = _string(f"{name}.arguments", item.get("arguments"))
    else:  # of another model, early in the conversation
        arguments = {"input": _string(f"{name}.input", item.get("input"))}
    function = {"name": _string(f"{name}.name", item.get("name")), "arguments": arguments}
    return {"id": _string(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: object, tools: Sequence[Any]) -> object:
    if choice in ("auto", "none") and not tools:
        return None
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise UsageError(
                f'tool_choice must be "none", "auto", "required" or {{"type": "function", "name": ...}}, found '
                f"{shown(choice)}."
            )
        return {"type": "function", "function": {"name": _string("tool_choice.name", choice.get("name"))}}
    return choice


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise UsageError(f"text.format.type must be text, json_object or json_schema; found {shown(kind)}.")
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(given.get("schema"), Mapping):
        raise UsageError(f"text.format.schema must be a JSON schema, found {shown(given.get('schema'))}.")
    return {"type": kind, "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text, found {shown(value)}.")
    return value
