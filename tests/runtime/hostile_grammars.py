"""Grammars that would end, fill or hold up the process that parses them: one or two of each kind."""

from __future__ import annotations

import json
from typing import Any


def _chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "integer"}}}


def _rules(count: int, rule: str, last: str) -> str:
    return "\n".join(["start: r0", *(f"r{i}: " + rule.format(f"r{i + 1}") for i in range(count)), f"r{count}: {last}"])


def _nested(opening: str, middle: str, closing: str, depth: int) -> str:
    return opening * depth + middle + closing * depth


HOSTILE: dict[str, dict[str, Any]] = {
    # Recursion: the stack.
    "chain of 1,000 $ref": {"json": _chain(1000)},
    "chain of 30,000 $ref": {"json": _chain(30_000)},
    "$ref to itself": {"json": {"$ref": "#"}},
    "$ref in a ring": {"json": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}},
    "5,000 chained rules": {"grammar": _rules(5000, "{}", '"a"')},
    "50,000 chained terminals": {"grammar": _rules(50_000, '"x" {}', '"a"').upper().replace("START", "start")},
    "20,000 brackets": {"regex": _nested("(", "a", ")", 20_000)},
    "3,000 brackets of GBNF": {"grammar": "root ::= " + _nested("(", '"a"', ")", 3000)},
    "50,000 nested properties": {"json": _nested('{"type":"object","properties":{"a":', "{}", "}}", 50_000)},
    "2,000 nested anyOf": {"json": _nested('{"anyOf":[', "{}", "]}", 2000)},
    "60 nested allOf": {"json": _nested('{"allOf":[', '{"type":"string"}', "]}", 60)},
    "left and right recursion": {"grammar": 'start: start start | "(" start ")" | start "a" | "a" start | ""'},
    "a text without an end": {"grammar": 'start: "a" start'},
    # Repetition: time and memory.
    "((a{100}){100}){100}": {"regex": "((a{100}){100}){100}"},
    "the same behind a letter": {"regex": "x((a{100}){100}){100}"},
    "a{1000000000}": {"regex": "a{1000000000}"},
    "stars of stars": {"regex": _nested("(", "a*", ")*", 50)},
    "(.*)a.{2000}": {"regex": "(.*)a.{2000}"},
    "quantifiers of quantifiers": {"grammar": 'start: ((("a"~0..300)~0..300)~0..300)~0..300'},
    "2^40 texts": {"grammar": _rules(40, "{0} {0}", '"x" | "y" | ""')},
    "ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" | "aa" | '},
    "minItems 10^9": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9}},
    "maxItems 10^5 three times": {
        "json": {"type": "array", "maxItems": 10**5, "items": {"type": "array", "maxItems": 10**5}}
    },
    "minLength 10^9": {"json": {"type": "string", "minLength": 10**9}},
    "minItems 10^6 in Lark": {"grammar": 'start: %json {"type":"array","minItems":1000000}'},
    # Size.
    "choice of 50,000": {"choice": [f"text {i} of many" for i in range(50_000)]},
    "enum of 50,000": {"json": {"enum": [f"text {i} of many" for i in range(50_000)]}},
    "choice of 3 MB": {"choice": ["x" * 3_000_000]},
    "const of 1 MB": {"json": {"const": "日" * 300_000}},
    "3,000 optional properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    },
    "64 patterns of properties": {
        "json": {
            "type": "object",
            "patternProperties": {f"^{a}.*{b}.*$": {"type": "integer"} for a in "abcdefgh" for b in "abcdefgh"},
        }
    },
    "allOf of anyOf": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"k{i}": {"const": j}}, "required": [f"k{i}"]} for j in range(6)]}
                for i in range(9)
            ]
        }
    },
    "alternations of alternations": {
        "regex": "|".join("(" + "|".join("ab"[i >> j & 1] for j in range(12)) + "){1,30}" for i in range(3000))
    },
    # What the library has not, or stumbles over.
    "look-ahead": {"regex": "(?=a)(?!b)a"},
    "back reference": {"regex": r"(a)\1"},
    "classes of Unicode": {"regex": r"[\p{L}\p{M}\p{N}]{0,1000}\p{Emoji}{1000}"},
    "nothing at all": {"regex": r"[^\s\S]"},
    "import of a file": {"grammar": "%import common.NUMBER\n%import /etc/passwd\nstart: NUMBER"},
    "everything is ignored": {"grammar": 'start: "a"+\n%ignore /(.|\\n)*/'},
    "lazy texts": {"grammar": "start: /(.|\\n)*?end/ /(.|\\n)*?end/"},
    "numbers of 300 digits": {"json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    "multipleOf 10^-300": {"json": {"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 1e308}},
    "half a surrogate pair": {"json": '{"const":"\\u0000\\ud800"}'},
    "a type that is cut within a character": {"json": json.dumps({"type": "é" * 300}, ensure_ascii=False)},
}
