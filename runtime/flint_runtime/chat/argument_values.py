"""From the text of an argument, as the model wrote it, to JSON of the type that the function's schema asks for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_MOST_LEVELS = 200
"""Of arrays and objects in a value: a client's reader has a limit too."""
STRING = frozenset({"string"})
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_EXACT_FLOAT = 2.0**53
"""Below it a float is a whole number only if it was written as one."""


class ArgumentTypes:
    """Types of a function's arguments, by its schema."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters
        self._known: dict[str, frozenset[str] | None] = {}
        self._types: dict[int, frozenset[str] | None] = {}
        """Of each schema by its identity, None while it is being looked at: references may lead back to it."""

    def of(self, key: str) -> frozenset[str] | None:
        """The JSON types that an argument may have; None where the schema does not say."""
        if key not in self._known:
            self._known[key] = self._types_of(self._property(self._root, key, set()))
        return self._known[key]

    def _property(self, schema: Any, key: str, seen: set[int]) -> Any:
        """The schema of an argument; None where there is none."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return None
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        others = [_target(schema, self._root)]
        for word in ("allOf", "anyOf", "oneOf"):
            parts = schema.get(word)
            others += parts if isinstance(parts, list) else []
        for other in others:
            found = self._property(other, key, seen)
            if found is not None:
                return found
        more = schema.get("additionalProperties")
        return more if isinstance(more, Mapping) else None

    def _types_of(self, schema: Any) -> frozenset[str] | None:
        """The types that a schema allows; None where it says nothing of them."""
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._types:
            self._types[id(schema)] = None
            self._types[id(schema)] = self._find_types(schema)
        return self._types[id(schema)]

    def _find_types(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        limits = [_own_types(schema), self._types_of(_target(schema, self._root))]
        for word in ("anyOf", "oneOf"):
            parts = schema.get(word)
            if isinstance(parts, list) and parts:
                found = [self._types_of(part) for part in parts]
                known = [one for one in found if one is not None]
                limits.append(frozenset().union(*known) if len(known) == len(found) else None)
        parts = schema.get("allOf")
        limits += [self._types_of(part) for part in parts] if isinstance(parts, list) else []
        known = [one for one in limits if one is not None]
        if not known:
            return None
        result = frozenset.intersection(*known) or known[0]
        return result | {"null"} if schema.get("nullable") is True else result


def to_json(text: str, types: frozenset[str] | None) -> str:
    """An argument as JSON: of one of its types if it can be read so, else whatever JSON it is, else a string.

    What is JSON already stays as it was written, so that an integer keeps any size. Never NaN or Infinity.
    """
    bare = text.strip()
    if types is None:
        return bare if _is_json(bare) else quoted(text)
    if "null" in types and (bare == "null" or (bare == "None" and "string" not in types)):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    number = _number(bare, whole="number" not in types) if types & {"integer", "number"} else None
    if number is not None:
        return number
    first = {"[": "array", "{": "object"}.get(bare[:1])
    if first in types and _is_json(bare):
        return bare
    return bare if "string" not in types and _is_json(bare) else quoted(text)


def quoted(text: str) -> str:
    """A text as a JSON string, which can be encoded as UTF-8 whatever is in it."""
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    """The inside of a JSON string. Pieces of a text, escaped one by one, concatenate to the whole text's."""
    return _encodable(_ENCODER.encode(text)[1:-1])


def object_to_json(value: dict[str, Any]) -> str:
    """An object that came from JSON, as JSON which can be encoded as UTF-8."""
    return _encodable(_ENCODER.encode(value))


def read_json(text: str) -> Any:
    """The value of a JSON text that stays finite. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _encodable(text: str) -> str:
    """Halves of surrogate pairs as escapes."""
    return text if text.isascii() else _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _number(text: str, whole: bool) -> str | None:
    """A number as JSON, one with a point or an exponent as an integer if it is one; None for anything else."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    if found[1] is None and found[2] is None:
        return text
    value = float(text)
    if value.is_integer() and abs(value) < _EXACT_FLOAT:
        return str(int(value))
    return text if math.isfinite(value) and not whole else None


def _is_json(text: str) -> bool:
    """Whether a text is strict JSON, with finite numbers, which others can read too."""
    if text[:1] not in _STARTS:
        return False
    try:
        text.encode()
        json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=len)
    except (ValueError, RecursionError):
        return False
    return text[0] not in "[{" or _levels(text) <= _MOST_LEVELS


_STARTS = frozenset('{["-0123456789tfn')
_BRACKET_OR_STRING = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*"')


def _levels(text: str) -> int:
    """How deep a JSON text nests."""
    if text.count("[") + text.count("{") <= _MOST_LEVELS:
        return 0
    level = deepest = 0
    for found in _BRACKET_OR_STRING.finditer(text):
        level += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        deepest = max(deepest, level)
    return deepest


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _target(schema: Mapping[str, Any], root: Any) -> Any:
    """What a schema's $ref points at inside the document; None where it has none, or it points elsewhere."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            return None
    return found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """By a schema's own words."""
    named = schema.get("type")
    types = frozenset([named] if isinstance(named, str) else [])
    if isinstance(named, list):
        types = frozenset(one for one in named if isinstance(one, str))
    types &= _TYPES
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        by_value = frozenset(_type_of(value) for value in values)
        narrowed = types & by_value
        # 1 is a number too.
        return narrowed or types or by_value
    if types:
        return types
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"
