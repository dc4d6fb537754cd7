"""A request's tools and tool_choice: what is taken, and that every refusal names its field."""

from __future__ import annotations

from typing import Any

import pytest

from flint_runtime.chat.tools import MOST_TOOLS, NamedTool, parse_tool_choice, parse_tools
from flint_runtime.errors import UsageError


def tool(name: Any = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_a_tool_is_kept_as_it_was_sent() -> None:
    sent = tool("b", parameters={"type": "object", "properties": {"z": {}, "a": {}}}, strict=True, description="B.")
    sent["cache_control"] = {"x": 1}
    found = parse_tools([sent, tool("a", parameters=None, strict=None)])
    assert list(found) == ["b", "a"]
    one = found["b"]
    assert one.definition is sent and one.strict and one.description == "B."
    assert list(one.parameters["properties"]) == ["z", "a"]
    assert (found["a"].parameters, found["a"].strict, found["a"].description) == ({}, False, None)
    assert parse_tools(None) == parse_tools([]) == {}


@pytest.mark.parametrize(("tools", "field"), [
    ("x", "tools "),
    ({}, "tools "),
    ([1], r"tools\[0\] "),
    ([tool(), {"type": "web_search"}], r"tools\[1\]\.type "),
    ([{"function": {"name": "a"}}], r"tools\[0\]\.type "),
    ([{"type": "function"}], r"tools\[0\]\.function "),
    ([tool(None)], r"tools\[0\]\.function\.name "),
    ([tool("")], r"tools\[0\]\.function\.name "),
    ([tool("a b")], r"tools\[0\]\.function\.name "),
    ([tool("a\n")], r"tools\[0\]\.function\.name "),
    ([tool("ä")], r"tools\[0\]\.function\.name "),
    ([tool("a" * 129)], r"tools\[0\]\.function\.name "),
    ([tool("a"), tool("a")], r"tools\[1\]\.function\.name .* once"),
    ([tool(description=1)], r"tools\[0\]\.function\.description "),
    ([tool(description="\ud800")], r"tools\[0\]\.function "),
    ([tool(strict="yes")], r"tools\[0\]\.function\.strict "),
    ([tool(parameters=[])], r"tools\[0\]\.function\.parameters "),
    ([tool(parameters={"a": float("nan")})], r"tools\[0\]\.function\.parameters "),
    ([tool(parameters={"a": "\ud800"})], r"tools\[0\]\.function\.parameters "),
    ([tool(parameters={"a": b""})], r"tools\[0\]\.function\.parameters "),
    ([tool(parameters={"a": "x" * 1_000_000})], r"tools\[0\]\.function\.parameters .*1,000,000"),
    ([tool(parameters=nested(65))], r"tools\[0\]\.function\.parameters .*64"),
    ([tool(parameters=nested(100_000))], r"tools\[0\]\.function\.parameters .*64"),
    ([tool(extra=nested(70))], r"tools\[0\]\.function .*64"),
    ([tool(f"f{i}") for i in range(MOST_TOOLS + 1)], "tools .*1024"),
])  # fmt: skip
def test_a_refusal_names_the_field(tools: Any, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}"):
        parse_tools(tools)


def test_what_is_at_the_limit_is_taken() -> None:
    assert len(parse_tools([tool(f"f{i}") for i in range(MOST_TOOLS)])) == MOST_TOOLS
    parse_tools([tool("a" * 128, parameters=nested(64))])
    parse_tools([tool(parameters={"a": "x" * (1_000_000 - len('{"a": ""}'))})])


def test_choices() -> None:
    tools = parse_tools([tool()])
    named = {"type": "function", "function": {"name": "weather"}}
    assert parse_tool_choice(None, tools) == "auto"
    assert parse_tool_choice(None, {}) == "none"
    for choice in ("none", "auto", "required"):
        assert parse_tool_choice(choice, tools) == choice
    assert parse_tool_choice("auto", {}) == "auto"
    assert parse_tool_choice(named, tools) == NamedTool("weather")


@pytest.mark.parametrize(("value", "field"), [
    ("any", "tool_choice "),
    (1, "tool_choice "),
    ({}, "tool_choice "),
    ({"type": "allowed_tools"}, "tool_choice "),
    ({"type": "function"}, r"tool_choice\.function\.name "),
    ({"type": "function", "function": {"name": 1}}, r"tool_choice\.function\.name "),
    ({"type": "function", "function": {"name": "time"}}, r"tool_choice\.function\.name .*weather.*time"),
])  # fmt: skip
def test_a_choice_is_refused(value: Any, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}"):
        parse_tool_choice(value, parse_tools([tool()]))


def test_a_choice_that_needs_a_tool_has_one() -> None:
    with pytest.raises(UsageError, match="required"):
        parse_tool_choice("required", {})
