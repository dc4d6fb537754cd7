"""A conversation as clients write it, in OpenAI's API, into the one form that released chat templates read.

Templates drop what they do not know without a word: roles, parts, `reasoning`. And they ask `arguments` for its items,
which clients send as the text of JSON. So all of that is put right before a template sees it, or refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from flint_runtime.arguments import text
from flint_runtime.errors import UsageError, shown

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Those of OpenAI's API. Templates drop a message of any other."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, with the field that has it."""
_ADVICE = {
    "audio": "Flint reads text only.",
    "images": "Flint reads text only.",
    "function_call": "Send tool_calls.",
}
"""Fields that say something no template prints, with what helps."""
_WITHOUT_CONTENT = ("assistant", "tool")
"""Roles whose messages may leave content out: one that only calls, and a result that is nothing."""


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates read them; the caller's own are not changed.

    In each, `content` is a text: parts are joined, null is "". `developer` is `system`. `reasoning` and
    `reasoning_content` are the same text, if there is one. The `arguments` of a call are an object; where the text that
    was sent is the JSON of none, as in a call that was cut off, they are {} and a warning is logged: one bad turn must
    not end a conversation. Fields that nobody knows stay, for a template of the user's own.

    Raises:
        UsageError: these are no messages, or something in them would not reach the prompt. It names the place, such as
            messages[3].content[1].
    """
    if not _is_list(messages):
        raise UsageError(
            f'messages must be a list such as [{{"role": "user", "content": "Hi"}}], found {shown(messages)}.'
        )
    if not messages:
        raise UsageError("messages must have a message, found none.")
    malformed: list[str] = []
    found = [_message(f"messages[{index}]", message, malformed) for index, message in enumerate(messages)]
    if malformed:
        logger.warning(
            "The arguments of %d calls in a conversation are no JSON object, and stand in its prompt as {}. The first: "
            "%s",
            len(malformed),
            malformed[0],
        )
    return found


def _message(name: str, message: object, malformed: list[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f'{name} must be such as {{"role": "user", "content": "Hi"}}, found {shown(message)}.')
    role = message.get("role")
    if role not in ROLES:
        raise UsageError(f"{name} must have a role of {', '.join(ROLES)}; found {shown(role)}.")
    for key, advice in _ADVICE.items():
        if message.get(key):
            raise UsageError(f"{name}.{key} must be left out, found {shown(message[key])}. {advice}")
    found = {
        **message,
        "role": "system" if role == "developer" else role,
        "content": _content(f"{name}.content", _given_content(message)),
    }
    reasoning = _reasoning(name, message)
    for key in ("reasoning", "reasoning_content"):
        found.pop(key, None)
        if reasoning:
            found[key] = reasoning
    calls = _calls(f"{name}.tool_calls", found.pop("tool_calls", None), malformed)
    if calls:
        found["tool_calls"] = calls
    if role != "assistant" and (reasoning or calls):
        what = "tool_calls" if calls else "reasoning"
        raise UsageError(f"{name} must have no {what}: only a message of the assistant's has, found the role {role!r}.")
    return found


def _given_content(message: Message) -> object:
    """What a message says; None only where there is no such field and must be one."""
    content = message.get("content")
    if not content and message.get("refusal"):
        return message["refusal"]  # what an assistant says in its answer's place
    if content is None and ("content" in message or message["role"] in _WITHOUT_CONTENT):
        return ""
    return content


def _content(name: str, content: object) -> str:
    if isinstance(content, str):
        return text(name, content)
    if not _is_list(content):
        raise UsageError(f"{name} must be a text or a list of text parts, found {shown(content)}.")
    return "".join(_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part(name: str, part: object) -> str:
    if isinstance(part, str):
        return text(name, part)
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(part, Mapping) or key is None:
        what = f"one of the type {shown(kind)}" if isinstance(kind, str) else shown(part)
        raise UsageError(
            f'{name} must be a text part, {{"type": "text", "text": "Hi"}}, found {what}. Flint reads text only.'
        )
    if not isinstance(part.get(key), str):
        raise UsageError(f"{name}.{key} must be the text of this text part, found {shown(part.get(key))}.")
    return text(f"{name}.{key}", part[key])


def _reasoning(name: str, message: Message) -> str:
    """The thinking part of a message, by either name; clients may send both."""
    given = [text(f"{name}.{k}", message[k]) for k in ("reasoning_content", "reasoning") if message.get(k) is not None]
    return next(filter(None, given), "")


def _calls(name: str, calls: object, malformed: list[str]) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not _is_list(calls):
        raise UsageError(f"{name} must be a list of calls, found {shown(calls)}.")
    return [_call(f"{name}[{index}]", call, malformed) for index, call in enumerate(calls)]


def _call(name: str, call: object, malformed: list[str]) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f'{name} must be such as {{"function": {{"name": "now", "arguments": "{{}}"}}}}, found {shown(call)}.'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        parsed = _parse_object(arguments)
        if parsed is None:
            malformed.append(f"{name}, {shown(arguments)}")
        arguments = parsed or {}
    elif not isinstance(arguments, Mapping | None):
        raise UsageError(f"{name} must have arguments as an object or its JSON, found {shown(arguments)}.")
    function = {**function, "arguments": arguments or {}}
    return {**call, "function": function} if "function" in call else function


def _parse_object(source: str) -> dict[str, Any] | None:
    """The object that a text is the JSON of, the empty text among them; None where it is none."""
    if not source.strip():
        return {}
    try:
        found = json.loads(source)
        if "\\u" in source:
            found = _without_halves(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _without_halves(value: Any) -> Any:
    """A JSON value with U+FFFD for every half of a surrogate pair: JSON may spell one, but no prompt can have it."""
    spelled = json.dumps(value, ensure_ascii=False)
    try:
        spelled.encode()
    except UnicodeEncodeError:
        return json.loads(spelled.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
