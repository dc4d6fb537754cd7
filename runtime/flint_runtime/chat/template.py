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

from flint_runtime.arguments import flag, text
from flint_runtime.chat.messages import Message, normalize_messages
from flint_runtime.chat.template_sandbox import MOST_CHARACTERS, TemplateSandbox, with_small_widths
from flint_runtime.errors import UsageError, shown

Tool = Mapping[str, Any]

_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
_SWITCHES = ("enable_thinking", "clear_thinking")
"""Options of GLM's templates that are true or false."""


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
        conversation = normalize_messages(messages)
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


def template_options(
    kwargs: object, *, reasoning_effort: str | None = None, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a template is told besides the messages, as arguments of `ChatTemplate.render`.

    Args:
        kwargs: chat_template_kwargs; None is none.
        reasoning_effort: "none" switches thinking off, any other switches it on, unless kwargs say enable_thinking.
            The same as kwargs' own option of this name.
        defaults: the server's, which anything of the request's goes before.
    Raises:
        UsageError: they are no options.
    """
    given = _options("chat_template_kwargs", kwargs)
    if reasoning_effort is not None:
        given["reasoning_effort"] = text("reasoning_effort", reasoning_effort)
    return {**_with_thinking(_options("default-chat-template-kwargs", defaults)), **_with_thinking(given)}


def _options(name: str, kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"{name} must map names to values, found {shown(kwargs)}.")
    taken = [key for key in _ARGUMENTS if key in kwargs]
    if taken:
        raise UsageError(f"{name} must not have {', '.join(taken)}: pass it as an argument of its own.")
    options = dict(kwargs)
    for key in _SWITCHES:
        # Templates take null and 0 for false, and "false" for true.
        if options.get(key) is None:
            options.pop(key, None)
        else:
            options[key] = flag(f"{name}.{key}", options[key])
    return options


def _with_thinking(options: dict[str, Any]) -> dict[str, Any]:
    """Options with enable_thinking, where reasoning_effort says it and they do not."""
    effort = options.get("reasoning_effort")
    return options if effort is None else {"enable_thinking": effort != "none", **options}


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


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """A message with a mark at its end. Raises UsageError where the answer cannot go on with it."""
    if message.get("tool_calls"):
        raise UsageError("continue_final_message cannot go on with a message that has tool_calls.")
    return {**message, "content": message["content"] + mark}


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
