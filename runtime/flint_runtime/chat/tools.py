"""The functions that a client declares, and which of them the answer may or must call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flint_runtime.arguments import flag, text
from flint_runtime.errors import UsageError, shown

MOST_TOOLS = 1024
MOST_SCHEMA_BYTES = 1_000_000
MOST_SCHEMA_LEVELS = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """One declared function."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments; empty if none was given."""
    strict: bool = False
    definition: Mapping[str, Any] = field(default_factory=dict)
    """The whole tool as the client sent it, its keys in their order: what the template prints."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The answer must be a call of this function."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def parse_tools(tools: object) -> dict[str, FunctionTool]:
    """The functions of a request's `tools`, by name, in the client's order; None is none.

    Raises:
        UsageError: a tool is no function, or above a limit; the message names the field.
    """
    if tools is None:
        return {}
    if not isinstance(tools, list | tuple):
        raise UsageError(f"tools must be a list of functions, found {shown(tools)}.")
    if len(tools) > MOST_TOOLS:
        raise UsageError(f"tools must be at most {MOST_TOOLS} functions, found {len(tools)}.")
    found: dict[str, FunctionTool] = {}
    for i, value in enumerate(tools):
        tool = _parse_tool(f"tools[{i}]", value)
        if tool.name in found:
            raise UsageError(
                f"tools[{i}].function.name must be declared once, found {tool.name!r} again. A call could mean either "
                "function: rename one of them."
            )
        found[tool.name] = tool
    return found


def parse_tool_choice(value: object, tools: Mapping[str, FunctionTool]) -> ToolChoice:
    """A request's `tool_choice`; None is "auto" with tools, and "none" without.

    Raises:
        UsageError: it is of no known shape, or needs a function that `tools` does not declare.
    """
    if value is None:
        return "auto" if tools else "none"
    if isinstance(value, str) and value in _CHOICES:
        if value == "required" and not tools:
            raise UsageError('tool_choice "required" needs a function to call, but tools declares none.')
        return value  # type: ignore[return-value]
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise UsageError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, found '
            f"{shown(value)}."
        )
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UsageError(f"tool_choice.function.name must be the name of a declared function, found {shown(name)}.")
    if name not in tools:
        raise UsageError(
            f"tool_choice.function.name must be a function that tools declares ({shown(list(tools))}), found "
            f"{shown(name)}."
        )
    return NamedTool(name)


def _parse_tool(where: str, value: object) -> FunctionTool:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object, found {shown(value)}.")
    if value.get("type") != "function":
        raise UsageError(f'{where}.type must be "function", found {shown(value.get("type"))}.')
    function = value.get("function")
    if not isinstance(function, dict):
        raise UsageError(f"{where}.function must be an object, found {shown(function)}.")
    where += ".function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}.name must be 1 to 128 letters, digits or any of _.- , found {shown(name)}.")
    description, strict = function.get("description"), function.get("strict")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise UsageError(f"{where}.parameters must be a JSON schema, an object, found {shown(parameters)}.")
    # Both are printed into the prompt, and whatever else stands in the definition is too.
    _check_json(f"{where}.parameters", parameters)
    _check_json(where, {key: part for key, part in value.items() if key != "function"})
    _check_json(where, {key: part for key, part in function.items() if key != "parameters"})
    return FunctionTool(
        name,
        None if description is None else text(f"{where}.description", description),
        parameters or {},
        False if strict is None else flag(f"{where}.strict", strict),
        value,
    )


def _check_json(where: str, value: Any) -> None:
    """Raise UsageError where a value is no JSON, too large or too deep."""
    if _levels_above(value, MOST_SCHEMA_LEVELS):
        raise UsageError(f"{where} must be nested at most {MOST_SCHEMA_LEVELS} levels deep, found more.")
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError:
        raise UsageError(f"{where} has half of a surrogate pair in a text, which is no character.") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} must be JSON: {error}.") from None
    if size > MOST_SCHEMA_BYTES:
        raise UsageError(f"{where} must be at most {MOST_SCHEMA_BYTES:,} bytes as JSON, found {size:,}.")


def _levels_above(value: Any, most: int) -> bool:
    """Whether arrays and objects are nested more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [one for one in level if isinstance(one, dict | list | tuple)]
        if not level:
            return False
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return True
