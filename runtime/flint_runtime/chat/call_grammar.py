"""The grammar of an answer's calls: declared names, declared keys, values of their types.

A call is `<tool_call>NAME<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`. The markers are tokens, not
text: so a value may have any text, a marker's characters among it, and ends where the token stands. Texts are written
as they are, everything else as JSON.

A tool without `strict` is held to the basic types: of its schema nothing else reaches the grammar library, so that no
schema, however strange, stands in a request's way. With `strict` the whole schema holds: every required key, no key
twice, and values that match their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from flint_runtime.chat.tools import FunctionTool, NamedTool, ToolChoice
from flint_runtime.errors import UsageError
from flint_runtime.grammar_worker import WHITESPACE
from flint_runtime.json_schema import normalize_schema
from flint_runtime.sampling_params import CallParams

_MOST_COUNTED_KEYS = 64
"""Keys that the library can tell whether they were given, a bit for each."""
_MOST_SINGLE_KEYS = 500
"""Of all tools: beyond, keys whose values are alike share a rule, and may be given twice. The library's grammars have
65,000 symbols, of which a key takes ten."""
_JSON_TYPES = ("integer", "number", "boolean", "null", "array", "object")
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref")
_DEFINITIONS = ("$defs", "definitions")
_TEXT, _ANY = "TEXT", "TEXT"
_LONGEST_COUNTED_TEXT = 1000


def call_grammar(tools: Mapping[str, FunctionTool], choice: ToolChoice, *, parallel: bool = True) -> CallParams | None:
    """What `StructuredOutputsParams.calls` must be for these tools; None where nothing may be called.

    With "auto", text may stand around calls and there need be none. With "required" there is at least one, with a named
    choice exactly one. All hold behind the thinking part.

    Args:
        parallel: there may be several calls.
    Raises:
        UsageError: the schema of a strict tool has what cannot be followed; the message names it.
    """
    if choice == "none" or not tools:
        return None
    if isinstance(choice, NamedTool):
        return CallParams(_grammar([tools[choice.name]]), free=False, most=1, ends=True)
    free = choice == "auto"
    return CallParams(_grammar(tools.values()), free=free, most=None if parallel else 1, ends=not free and not parallel)


def _grammar(tools: Iterable[FunctionTool]) -> str:
    tools = list(tools)
    writer = _Writer(counted=sum(len(_properties(tool.parameters)[0]) for tool in tools) <= _MOST_SINGLE_KEYS)
    calls = [f"{json.dumps(tool.name)} {writer.arguments(tool)}" for tool in tools]
    return "\n".join([f"start: ({' | '.join(calls)}) </tool_call>", *writer.lines, 'NL: "\\n"', "TEXT: /(?s:.*)/"])


class _Writer:
    """Writes rules; the same one only once."""

    def __init__(self, *, counted: bool) -> None:
        self._counts = counted
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The name of a rule."""
        if body not in self._names:
            self._names[body] = f"r{len(self._names)}"
            self.lines.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def arguments(self, tool: FunctionTool) -> str:
        """What stands between a tool's name and the end of a call."""
        schema = tool.parameters
        properties, others = _properties(schema)
        required = schema.get("required")
        needed = [key for key in required if isinstance(key, str)] if tool.strict and isinstance(required, list) else []
        if tool.strict:
            _check_strict(tool, properties, needed, others)
        ordered = {**{key: properties[key] for key in needed if key in properties}, **properties}
        values = {key: self._value(tool, one) for key, one in ordered.items()}
        if not values and others is None:
            return "NL?"
        is_counted = others is None and len(values) <= _MOST_COUNTED_KEYS and self._counts
        if not tool.strict and not is_counted:
            return f"{self.rule(f'({_either(self._shared(values, others))})*')} NL?"
        arguments = [self._argument(_literal(key), value) for key, value in values.items()]
        if len(arguments) <= _MOST_COUNTED_KEYS:
            return self._counted(arguments, len(needed))
        # In the order of the schema, as JSON has it where a schema pins it.
        ordered_keys = zip(ordered, arguments, strict=True)
        return " ".join(one if key in needed else f"{one}?" for key, one in ordered_keys) + " NL?"

    def _counted(self, arguments: list[str], needed: int) -> str:
        """Arguments in any order, none of them twice; the first `needed` must be there."""
        end = f"NL? %if is_ones([0:{needed}])" if needed else "NL?"
        more = [f"{one} SELF::set_bit({bit}) %if bit_clear({bit})" for bit, one in enumerate(arguments)]
        body = "\n  | ".join([end, *more])
        if body not in self._names:
            name = self._names[body] = f"r{len(self._names)}"
            self.lines.append(f"{name}::_ : {body.replace('SELF::', f'{name}::')}")
        return f"{self._names[body]}::0x0"

    def _shared(self, values: Mapping[str, str], others: Any) -> list[str]:
        """Arguments, those with the same kind of value together."""
        keys: dict[str, list[str]] = {}
        for key, value in values.items():
            keys.setdefault(value, []).append(_literal(key))
        found = [self._argument(self._terminal(_either(some)), value) for value, some in keys.items()]
        return found if others is None else [*found, self._argument(_TEXT, _ANY)]

    def _terminal(self, body: str) -> str:
        """The name of a terminal: told apart by one automaton, however many texts it has."""
        if body not in self._names:
            self._names[body] = f"K{len(self._names)}"
            self.lines.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def _argument(self, key: str, value: str) -> str:
        return self.rule(f"NL? <arg_key> {key} </arg_key> NL? <arg_value> {value} </arg_value>")

    def _value(self, tool: FunctionTool, schema: Any) -> str:
        """A value as it is written."""
        if not isinstance(schema, dict):
            return _ANY
        if tool.strict:
            return self._strict_value(tool, schema)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list) and choices:
            return self._choice(choices)
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(one in _JSON_TYPES for one in types):
            return _ANY
        return self._json({"type": types if len(types) > 1 else types[0]})

    def _strict_value(self, tool: FunctionTool, schema: dict[str, Any]) -> str:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list) and choices:
            return self._choice(choices)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.rule(_either(dict.fromkeys(self._value(tool, one) for one in schema[key])))
        types = schema.get("type")
        if isinstance(types, list) and "string" in types:
            return _ANY
        if types == "string":
            return _text(schema)
        if not schema.keys() - {"title", "description"}:
            return _ANY
        definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
        return self._json({**definitions, **schema})

    def _choice(self, choices: list[Any]) -> str:
        literals = dict.fromkeys(_literal(choice) for choice in choices)
        some = [literal for literal in literals if literal != '""']  # A terminal must not be empty.
        found = self._terminal(_either(some)) if some else ""
        return found if len(some) == len(literals) else self.rule(f"{found}?" if found else '""')

    def _json(self, schema: dict[str, Any]) -> str:
        text = normalize_schema(json.dumps(schema))
        found = {**json.loads(text), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self.rule(f"%json {json.dumps(found)}")


def _either(alternatives: Iterable[str]) -> str:
    return " | ".join(alternatives)


def _literal(value: Any) -> str:
    """A value as it is written in a call, as a literal of the grammar."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _text(schema: Mapping[str, Any]) -> str:
    """A text whose length may be limited. A pattern or a format is left to whoever reads it."""
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    low = low if type(low) is int else 0
    if type(high) is int and low <= high <= _LONGEST_COUNTED_TEXT:
        return f"/(?s:.){{{low},{high}}}/"
    return f"/(?s:.){{{low},}}/" if 0 < low <= _LONGEST_COUNTED_TEXT else _TEXT


def _properties(schema: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The declared keys with their schemas, and the schema of other keys; None: there are no others.

    JSON schemas allow any key unless they say otherwise, but a declared list of keys is meant as all there are.
    """
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    declared = properties if isinstance(properties, dict) else None
    if others is True or isinstance(others, dict):
        return declared or {}, others
    says_nothing = bool(schema) and declared is None and others is None
    is_combined = any(key in schema for key in _COMBINED)
    return declared or {}, True if says_nothing or (is_combined and others is not False) else None


def _check_strict(tool: FunctionTool, properties: Mapping[str, Any], needed: list[str], others: Any) -> None:
    """Raise UsageError for a schema that cannot be pinned."""
    where = f"The parameters of the strict function {tool.name!r}"
    missing = [key for key in needed if key not in properties]
    if missing:
        raise UsageError(f"{where} require {missing[0]!r}, which its properties do not declare. Declare it there.")
    if others is not None:
        raise UsageError(
            f"{where} must list their keys in properties, without others, anyOf, oneOf, allOf or $ref beside them: "
            "only then can a call be held to them. Rewrite them, or leave strict out."
        )
