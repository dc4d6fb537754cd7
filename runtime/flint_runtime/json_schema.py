"""JSON schemas as users write them, put in the terms of the grammar library."""

from __future__ import annotations

import json
from typing import Any

KNOWN_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""What the library knows of `format`. Any other is an annotation, which says nothing about the text (JSON Schema
2020-12, section 7 of the validation vocabulary)."""
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Keywords that the library does not have, with values that allow everything."""
_VALUES = ("const", "enum", "default", "examples")
"""Their values are no schemas, whatever they look like."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Their values map names to schemas."""


def normalize_schema(text: str) -> str:
    """A schema without the keywords that say nothing, but which the library would refuse.

    Raises:
        ValueError: it is not JSON, or no schema.
        RecursionError: it is nested too deeply to be read.
    """
    schema = json.loads(text)
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("no text matches the schema false")
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, true or false, found {type(schema).__name__}")
    return text if not _strip(schema) and schema else json.dumps(schema)


def _strip(schema: dict[str, Any]) -> bool:
    """Remove keywords in place, wherever a schema may stand; whether there were any."""
    found = False
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            empty = [key for key, value in one.items() if _says_nothing(key, value)]
            for key in empty:
                del one[key]
            found = found or bool(empty)
            for key, value in one.items():
                if key in _MAPS and isinstance(value, dict):
                    left += value.values()
                elif key not in _VALUES:
                    left.append(value)
    return found


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in KNOWN_FORMATS
    # By type, too: 0 is not false.
    return any(type(value) is type(nothing) and value == nothing for nothing in _SAYS_NOTHING.get(key, ()))
