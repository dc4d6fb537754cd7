"""The grammar of calls, over flint-nano's vocabulary: what may be drawn, token by token."""

from __future__ import annotations

import time
from typing import Any

import pytest

from flint_runtime.chat.call_grammar import call_grammar
from flint_runtime.chat.tools import NamedTool, ToolChoice, parse_tools
from flint_runtime.errors import UsageError
from flint_runtime.request import Grammar
from flint_runtime.sampling_params import StructuredOutputsParams
from tests.runtime.test_structured import COMPILER, EOS, TOKENIZER, allowed

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "", 3]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def start(tools: list[dict[str, Any]], choice: ToolChoice = "auto", *, parallel: bool = True, **more: Any) -> Grammar:
    params = call_grammar(parse_tools(tools), choice, parallel=parallel)
    assert params is not None
    return COMPILER.compile(StructuredOutputsParams(calls=params), **more)


def feed(grammar: Grammar, text: str) -> bool:
    """Whether every token of a text is allowed; `mask` and `accept` agree."""
    for token in TOKENIZER.encode(text):
        assert grammar.wait(10)
        fits = token in allowed(grammar)
        assert grammar.accept(token) == fits
        if not fits:
            return False
    return grammar.wait(10)


def call(name: str, **arguments: str) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


TOOLS = [tool("get", WEATHER), tool("get_all"), tool("no_args", {"type": "object", "properties": {}})]
MADE = [*TOOLS, tool("any", {"type": "object"}), tool("strict", WEATHER, True)]
MADE += [tool("open", {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}})]
MADE += [tool("odd", {"properties": {'q"\\ü\n': {"type": "null"}, "n": {"type": ["integer", "null"]}}})]
MADE += [tool("ref", {"properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}, True)]


@pytest.mark.parametrize(
    "text",
    [
        call("get", city="Paris", days="3"),
        call("get", days="-3", city="a <b> </arg_val\n\n日本"),
        call("get"),
        call("get", unit="", tags='["a", 1]'),
        call("get_all") + "\n" + call("no_args") + "and text",
        call("any", what="ever") + call("any"),
        call("strict", tags='["a"]', days="3", city=""),
        call("open", a="1", b="x"),
        call("odd", **{'q"\\ü\n': "null", "n": "12"}),
        call("ref", p="5"),
        "text only",
    ],
)
def test_calls_that_are_allowed(text: str) -> None:
    grammar = start(MADE)
    assert feed(grammar, "So: " + text) and allowed(grammar) >= EOS


@pytest.mark.parametrize(
    "text",
    [
        call("got"),
        call("get_al"),
        "<tool_call></tool_call>",
        call("get", town="Paris"),
        call("get", days="3.5"),
        call("get", days="three"),
        call("get", unit="k"),
        call("get", tags='{"a": 1}'),
        call("get", city="a", **{"days": "1"}).replace("days", "city"),
        call("get", city="<tool_call>"),
        "<tool_call>get<arg_value>",
        call("get_all", a="1"),
        call("no_args", a="1"),
        call("strict", city="Paris"),
        call("strict", city="Paris", days="3", tags="[1]"),
        call("ref", p="x"),
        "</tool_call>",
        "<arg_key>",
        "</think>",
    ],
)
def test_calls_that_are_not_allowed(text: str) -> None:
    assert not feed(start(MADE), "So: " + text)


@pytest.mark.parametrize("thinking", [False, True])
def test_required_is_at_least_one_call(thinking: bool) -> None:
    """Case G9: never text, never an end before a call; the thinking part is free."""
    grammar = start(TOOLS, "required", thinking=thinking)
    assert not thinking or feed(grammar, "Hm, text.</think>")
    assert not allowed(grammar) & EOS and not feed(start(TOOLS, "required"), "text")
    assert feed(grammar, "\n" + call("get_all"))
    assert allowed(grammar) >= EOS and not grammar.finished
    assert feed(grammar, "\n" + call("get", city="x")) and not feed(grammar, "text")


def test_white_space_before_a_call_ends() -> None:
    grammar = start(TOOLS, "required")
    newline = TOKENIZER.encode("\n")[0]
    assert all(grammar.accept(newline) for _ in range(4)) and not grammar.accept(newline)
    assert len(allowed(grammar)) == 1


@pytest.mark.parametrize(("choice", "name"), [(NamedTool("get_all"), "get_all"), ("required", "no_args")])
def test_exactly_one_call(choice: ToolChoice, name: str) -> None:
    grammar = start(TOOLS, choice, parallel=choice != "required", thinking=True)
    assert feed(grammar, "Hm.</think>" + call(name)) and grammar.finished
    assert not feed(start(TOOLS, NamedTool("get_all")), call("get"))


def test_one_call_at_most() -> None:
    grammar = start(TOOLS, parallel=False)
    assert feed(grammar, call("get_all") + "text") and allowed(grammar) >= EOS
    assert not feed(grammar, "<tool_call>")


def test_a_call_inside_the_thinking_part() -> None:
    grammar = start(TOOLS, thinking=True)
    assert grammar.triggers and feed(grammar, "Hm, text <tool_call>") and grammar.triggers is None
    assert feed(grammar, "get_all</tool_call>text") and grammar.triggers


def test_none_is_no_grammar() -> None:
    assert call_grammar(parse_tools(TOOLS), "none") is None and call_grammar({}, "auto") is None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "object"}, "list their keys"),
        ({"properties": {}, "required": ["a"]}, "require 'a'"),
        ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}}, "cannot be used"),
    ],
)
def test_strict_schemas_that_cannot_be_followed(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        start([tool("a", parameters, True)])
    start([tool("a", parameters)])


def test_many_tools_and_keys() -> None:
    kinds = ["string", "integer", "object"]
    many = [
        tool(f"tool_{i}", {"properties": {f"k{i}_{j}": {"type": kinds[j % 3]} for j in range(5)}}) for i in range(300)
    ]
    many.append(tool("big", {"properties": {f"key_{i}": {"type": kinds[i % 2]} for i in range(5000)}}))
    begin = time.monotonic()
    grammar = start(many)
    assert time.monotonic() - begin < 8
    assert feed(grammar, call("tool_299", k299_1="3") + call("big", key_4998="x"))
    assert not feed(grammar, call("big", key_4998="x", key_1="x"))
