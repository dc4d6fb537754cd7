"""A chat template: from messages to the text of a prompt, as transformers' apply_chat_template does."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser

from flint_runtime.arguments import text
from flint_runtime.chat.template_sandbox import MOST_CHARACTERS, TemplateSandbox, with_small_widths
from flint_runtime.errors import UsageError, shown

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Those of OpenAI's API. Templates drop a message of any other without a word."""
_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class TemplateSourceError(Exception):
    """A text is no chat template."""


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template; it may print the special tokens by their names.

        Raises:
            TemplateSourceError: it cannot be compiled.
        """
        environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = with_small_widths(_to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise TemplateSourceError("it is nested too deeply") from None
        except Exception as error:  # jinja's own, and Python's about the code that jinja makes of the template
            raise TemplateSourceError(str(error)) from None

    def render(
        self,
        /,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation.

        Args:
            add_generation_prompt: end with the start of the assistant's answer.
            continue_final_message: end within the last message, which the answer then goes on with.
            template_kwargs: whatever else the template reads.
        Raises:
            UsageError: the conversation is no list of messages, or the template rejects it.
        """
        conversation = _conversation(messages)
        _check_tools(tools)
        mark = ""
        if continue_final_message:
            if add_generation_prompt:
                raise UsageError(
                    "continue_final_message needs add_generation_prompt=False: an answer either goes on with the last "
                    "message or starts a new one."
                )
            mark = f"continued-{secrets.token_hex(8)}"
            conversation[-1] = _marked(conversation[-1], mark)
        try:
            rendered = self._print(
                {
                    **self._special_tokens,
                    "documents": None,
                    **template_kwargs,
                    "messages": conversation,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template is a program: whatever it raises, this conversation made it
            reason = "something in it is nested too deeply" if isinstance(error, RecursionError) else error
            raise UsageError(f"The chat template rejects this conversation: {reason!s:.500}") from None
        if mark:
            rendered, *rest = rendered.split(mark)
            if len(rest) != 1:
                raise UsageError(
                    "continue_final_message cannot be used: the chat template does not print the last message once."
                )
        return text("The conversation", rendered)

    def _print(self, values: Mapping[str, Any]) -> str:
        self._environment.begin()
        pieces, characters = [], 0
        for piece in self._template.generate(values):
            characters += len(piece)
            if characters > MOST_CHARACTERS:
                raise ValueError(f"it prints more than {MOST_CHARACTERS:,} characters")
            pieces.append(piece)
        return "".join(pieces)


def template_options(kwargs: object) -> dict[str, Any]:
    """chat_template_kwargs, as arguments of `ChatTemplate.render`. Raises UsageError."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise UsageError(f"chat_template_kwargs must map names to values, found {shown(kwargs)}.")
    taken = [name for name in _ARGUMENTS if name in kwargs]
    if taken:
        raise UsageError(f"chat_template_kwargs must not have {', '.join(taken)}: pass it as an argument of its own.")
    return dict(kwargs)


def _conversation(messages: object) -> list[Message]:
    """Messages as templates expect them. Raises UsageError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray | memoryview):
        raise UsageError(
            f'messages must be a list such as [{{"role": "user", "content": "Hi"}}], found {shown(messages)}.'
        )
    if not messages:
        raise UsageError("messages must have a message, found none.")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> Message:
    """A message whose content and calls are as released templates read them: they drop what they do not know."""
    if not isinstance(message, Mapping):
        raise UsageError(f'{name} must be such as {{"role": "user", "content": "Hi"}}, found {shown(message)}.')
    role = message.get("role")
    if role not in ROLES:
        raise UsageError(f"{name} must have a role of {', '.join(ROLES)}; found {shown(role)}.")
    found = {**message, "role": "system" if role == "developer" else role}
    content = message.get("content")
    if content is None and role == "assistant":
        found["content"] = ""
    else:
        _check_content(f"{name}.content", content)
    for key in ("reasoning_content", "reasoning"):
        if message.get(key) is not None:
            text(f"{name}.{key}", message[key])
    if message.get("reasoning") is not None and message.get("reasoning_content") is None:
        found["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls") is not None:
        found["tool_calls"] = _calls(f"{name}.tool_calls", message["tool_calls"])
    return found


def _check_content(name: str, content: object) -> None:
    """Raise UsageError unless content is a text or a list of text parts."""
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        raise UsageError(f"{name} must be a text or a list of text parts, found {shown(content)}.")
    for index, part in enumerate(content):
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(
                f'{name}[{index}] must be a text part, {{"type": "text", "text": "Hi"}}, found {shown(part)}. '
                "Flint reads text only."
            )


def _calls(name: str, calls: object) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI's API has them as text. Raises UsageError."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes | bytearray | memoryview):
        raise UsageError(f"{name} must be a list of calls, found {shown(calls)}.")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(
                f'{name}[{index}] must be such as {{"function": {{"name": "now", "arguments": "{{}}"}}}}, '
                f"found {shown(call)}."
            )
        given = function.get("arguments")
        if given is not None and not isinstance(given, str | Mapping):
            raise UsageError(f"{name}[{index}] must have arguments as an object or its JSON, found {shown(given)}.")
        function = {**function, "arguments": _object_of(given) if isinstance(given, str) else given or {}}
        found.append({**call, "function": function} if "function" in call else function)
    return found


def _object_of(source: str) -> Mapping[str, Any] | str:
    """The object that a text is the JSON of; the text itself if it is none, which is the template's to judge."""
    if not source.strip():
        return {}
    try:
        found = json.loads(source)
    except (ValueError, RecursionError):
        return source
    return found if isinstance(found, dict) else source


def _check_tools(tools: object) -> None:
    """Raise UsageError unless tools are a list of definitions, or None."""
    if tools is None:
        return
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes | bytearray | memoryview):
        raise UsageError(f"tools must be a list of tool definitions, found {shown(tools)}.")
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(
                f'tools[{index}] must be such as {{"type": "function", "function": {{"name": "now", "parameters": '
                f"{{}}}}}}, found {shown(tool)}."
            )


def _marked(message: Message, mark: str) -> Message:
    """A message with a mark at its end. Raises UsageError where it has no text to go on with."""
    content = message["content"]
    if message.get("tool_calls"):
        raise UsageError("continue_final_message cannot go on with a message that has tool_calls.")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    if not content:
        raise UsageError("continue_final_message needs a text in the last message, found no part of one.")
    *parts, last = content
    marked = last + mark if isinstance(last, str) else {**last, "text": last["text"] + mark}
    return {**message, "content": [*parts, marked]}


class _GenerationTag(Extension):
    """`{% generation %}`, with which transformers marks the assistant's tokens for training: only a scope here."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own name and type)

    def parse(self, parser: Parser) -> Node:
        """Replace the tag by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
