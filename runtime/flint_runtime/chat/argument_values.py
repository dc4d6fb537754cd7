"""A call's arguments, from the text that the model wrote to JSON, by the tool's schema.

What the schema declares decides: a value of a string parameter stays as written even if it looks like JSON. What fits
no declared type becomes a string, as in vLLM, for the tool to judge. Without a schema JSON is tried, then a string.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, NoReturn

_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MOST_REFERENCES = 64
"""Followed in one schema: a chain may lead in a circle."""
_EXACT = 2**53
"""Up to it a float without a fraction is one whole number."""


class ArgumentTypes:
    """The types that a tool's schema gives its parameters."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._types: dict[str, frozenset[str]] = {}

    def of(self, key: str) -> frozenset[str]:
        """JSON schema's names of the types that a parameter may have; empty where nothing is said."""
        found = self._types.get(key)
        if found is None:
            properties = _resolved(self._schema, self._schema).get("properties")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            found = self._types[key] = frozenset(_types(schema, self._schema, [_MOST_REFERENCES]))
        return found


def string_json(text: str) -> str:
    """A text as JSON, without the quotes: what a stream sends piece by piece."""
    found = encode_basestring(text)[1:-1]
    return found if found.isascii() else found.encode("utf-8", "replace").decode()


def value_json(text: str, types: frozenset[str]) -> str:
    """A value that is complete, as JSON; never NaN or Infinity.

    Args:
        text: as the model wrote it.
        types: from `ArgumentTypes.of`.
    """
    if types == {"string"}:
        return _string(text)
    found = _typed(text.strip(), types)
    return _string(text) if found is None else found


def _string(text: str) -> str:
    return f'"{string_json(text)}"'


def _typed(text: str, types: frozenset[str]) -> str | None:
    """The JSON of a value of one of the types that are no string; None if it is of none of them."""
    if not types:
        return text if _loaded(text) is not _NO_JSON else None
    if "null" in types and text == "null":
        return text
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    if types & {"integer", "number"} and (number := _number(text, "number" in types)):
        return number
    if types & {"array", "object"}:
        loaded = _loaded(text)
        if ("array" in types and isinstance(loaded, list)) or ("object" in types and isinstance(loaded, dict)):
            return text
    return None


def _number(text: str, fractions: bool) -> str | None:
    """JSON has no plus sign, no zeros in front, and no end to an integer."""
    if _INTEGER.fullmatch(text):
        sign = "-" if text[0] == "-" else ""
        return sign + (text.lstrip("+-").lstrip("0") or "0")
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        return None
    if value.is_integer() and abs(value) <= _EXACT:
        return str(int(value))
    return repr(value) if fractions else None


_NO_JSON = object()


def _loaded(text: str) -> Any:
    """What a text is the JSON of, or _NO_JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NO_JSON


def _finite(number: str) -> float:
    """A reader would make Infinity of 1e400."""
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _types(schema: Any, root: Mapping[str, Any], left: list[int]) -> set[str]:
    """The types that a schema allows, as far as it says; `left`: how many parts of it may still be looked at."""
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return set()
    schema = _resolved(schema, root)
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set()
    if isinstance(given, Sequence) and not isinstance(given, str):
        found |= {name for name in given if isinstance(name, str)}
    if not found:
        values = [*(schema["enum"] if isinstance(schema.get("enum"), list) else ())]
        values += [schema["const"]] if "const" in schema else []
        found |= {_type_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if not found and isinstance(schema.get(key), list):
            parts = [_types(part, root, left) for part in schema[key]]
            found |= set().union(*parts) if key != "allOf" or not all(parts) else set.intersection(*parts)
    if schema.get("nullable") is True and found:
        found.add("null")
    return found


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names: tuple[tuple[type, str], ...] = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "null" if value is None else "object")


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the part of `root` that its $ref leads to."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target: Any = root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return {}
        schema = target
    return {}
