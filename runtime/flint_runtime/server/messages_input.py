"""A request of Anthropic's API as one of /v1/chat/completions, which then goes the one way that all chats go.

What the model cannot read, such as an image, is refused and never dropped. Two things are: `redacted_thinking`, which
only the service that wrote it can read, and Claude Code's billing header (see `_without_billing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flint_runtime.errors import UsageError, shown
from flint_runtime.server.protocol.chat import ChatRequest
from flint_runtime.server.protocol.common import log_once
from flint_runtime.server.protocol.messages import CountTokensRequest, MessagesRequest

_BILLING_HEADER = "x-anthropic-billing-header:"
_FUNCTION_TYPES = (None, "custom")
"""Types of tools that have a schema of their own. Others are run by Anthropic, or have a schema that only it knows."""

Message = dict[str, Any]
Part = dict[str, Any]


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """A request in the form of /v1/chat/completions, without a model. Raises UsageError."""
    messages = _messages(body)
    tools = _tools(body.tools or [])
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        **_tool_choice(body.tool_choice, tools),
        **_thinking(body.thinking),
        "response_format": _response_format(body),
    }
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True  # Anthropic's API goes on with it
    if isinstance(body, MessagesRequest):
        for name in ("stream", "max_tokens", "temperature", "top_p", "top_k"):
            fields[name] = getattr(body, name)
        fields["stop"] = body.stop_sequences
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


# --- Messages ---------------------------------------------------------------------------------------------------------


def _messages(body: CountTokensRequest) -> list[Message]:
    found: list[Message] = []
    if body.system is not None:
        found += _system("system", body.system)
    for index, message in enumerate(body.messages):
        name = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise UsageError(
                f'{name} must be such as {{"role": "user", "content": "Hi"}}, with a role of user, assistant or '
                f"system; found {shown(message)}."
            )
        content, name = message.get("content"), f"{name}.content"
        if role == "system":
            found += _system(name, content)
        elif role == "assistant":
            found.append(_assistant(name, content))
        else:
            found += _user(name, content)
    return found


def _system(name: str, content: object) -> Iterator[Message]:
    parts = _without_billing([_text(where, block) for where, block in _blocks(name, content)])
    if any(part["text"] for part in parts):
        yield {"role": "system", "content": _content(parts)}


def _without_billing(parts: list[Part]) -> list[Part]:
    """Claude Code begins with a line that differs in every request: with it, no two prompts would share a prefix."""
    if parts and parts[0]["text"].startswith(_BILLING_HEADER):
        _, _, rest = parts[0]["text"].partition("\n")
        return [_part(rest), *parts[1:]] if rest.strip() else parts[1:]
    return parts


def _user(name: str, content: object) -> Iterator[Message]:
    """A user's message: tool results are messages of their own, and everything stays in its order."""
    parts: list[Part] = []
    blocks = list(_blocks(name, content))
    for where, block in blocks:
        if block["type"] == "tool_result":
            if parts:
                yield {"role": "user", "content": _content(parts)}
                parts = []
            yield _tool_result(where, block)
        else:
            parts.append(_text(where, block))
    if parts or not blocks:
        yield {"role": "user", "content": _content(parts)}


def _tool_result(name: str, block: Mapping[str, Any]) -> Message:
    content = block.get("content")
    parts = [_text(where, part) for where, part in _blocks(f"{name}.content", "" if content is None else content)]
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise UsageError(f"{name}.is_error must be true or false, found {shown(failed)}.")
    if failed:  # the model's format knows no failed results
        parts.insert(0, _part("Error: "))
    call_id = _string(f"{name}.tool_use_id", block.get("tool_use_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": _content(parts)}


def _assistant(name: str, content: object) -> Message:
    parts: list[Part] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in _blocks(name, content):
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_string(f"{where}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            calls.append(_call(where, block))
        elif kind != "redacted_thinking":
            parts.append(_text(where, block))
    message: Message = {"role": "assistant", "content": _content(parts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise UsageError(f"{name}.input must be an object, found {shown(given)}.")
    function = {"name": _string(f"{name}.name", block.get("name")), "arguments": given}
    return {"id": _string(f"{name}.id", block.get("id")), "type": "function", "function": function}


def _blocks(name: str, content: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content, each with its name for errors. A text is one block. Raises UsageError."""
    if isinstance(content, str):
        yield name, _part(content)
        return
    if not isinstance(content, Sequence):
        raise UsageError(f"{name} must be a text or a list of blocks, found {shown(content)}.")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise UsageError(
                f'{name}[{index}] must be a block such as {{"type": "text", "text": "Hi"}}, found {shown(block)}.'
            )
        yield f"{name}[{index}]", block


def _text(name: str, block: Mapping[str, Any]) -> Part:
    """A block that must be text, without what else is in it: cache marks change from turn to turn."""
    if block["type"] != "text":
        raise UsageError(
            f"{name} cannot be a block of type {shown(block['type'])} here. Flint reads text, and in their places "
            "thinking, tool_use and tool_result; no images and no documents."
        )
    return _part(_string(f"{name}.text", block.get("text")))


def _part(text: str) -> Part:
    return {"type": "text", "text": text}


def _content(parts: list[Part]) -> str | list[Part]:
    if len(parts) > 1:
        return parts
    text: str = parts[0]["text"] if parts else ""
    return text


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text, found {shown(value)}.")
    return value


# --- Tools and options ------------------------------------------------------------------------------------------------


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UsageError(f"tools[{index}] must be an object, found {shown(tool)}.")
        kind = tool.get("type")
        if kind not in _FUNCTION_TYPES:
            kind = _string(f"tools[{index}].type", kind)
            log_once(kind, "Requests offer a tool that is no function, which this server skips: %s")
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise UsageError(f"tools[{index}].input_schema must be a JSON schema, found {shown(schema)}.")
        function = {"name": _string(f"tools[{index}].name", tool.get("name"))}
        for name in ("description", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        found.append({"type": "function", "function": {**function, "parameters": schema}})
    return found


def _tool_choice(choice: Mapping[str, Any] | None, tools: Sequence[Any]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of a chat."""
    if choice is None:
        return {}
    kind = choice.get("type")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise UsageError(f"tool_choice.disable_parallel_tool_use must be true or false, found {shown(single)}.")
    found: dict[str, Any] = {"parallel_tool_calls": False} if single else {}
    if kind in ("auto", "none"):
        return {**found, "tool_choice": kind} if tools else found
    if kind == "any":
        return {**found, "tool_choice": "required"}
    if kind == "tool":
        name = _string("tool_choice.name", choice.get("name"))
        return {**found, "tool_choice": {"type": "function", "function": {"name": name}}}
    raise UsageError(f"tool_choice.type must be auto, any, tool or none; found {shown(kind)}.")


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Whether to think, and how long. Without it the server's default holds."""
    if thinking is None:
        return {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise UsageError(f"thinking.type must be enabled, adaptive or disabled; found {shown(kind)}.")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise UsageError(f"thinking.budget_tokens must be a number of tokens, found {shown(budget)}.")
    on = kind != "disabled"
    return {"chat_template_kwargs": {"enable_thinking": on}, "thinking_token_budget": budget if on else None}


def _response_format(body: CountTokensRequest) -> dict[str, Any] | None:
    name, given = "output_format", body.output_format
    if given is None and body.output_config is not None:
        name, given = "output_config.format", body.output_config.get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise UsageError(f"{name} must have the type json_schema, found {shown(given)}.")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema")}}
