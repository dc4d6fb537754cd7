"""Damage to bytes, to JSON and to templates, all drawn from a seeded generator."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (-(1 << 63), -1, 0, 1, 2, 3, 16, 64, 127, 128, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64)
TEXTS = ("", "\0", "x", "kv.0", "rope", "logits", "T", "pages", "slots", "é", "a" * 300, "full", "sliding", "bf16")
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, 0.5, -1e300, 10**30, None, True, False, [], {}, [[]], {"a": {}}, [None])
RAW = (
    *(b"NaN", b"-Infinity", b"1e400", b"-1e-400", b"1" + b"0" * 400, b"0" * 3, b"tru", b"'x'", b",", b":", b"}", b"]"),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xff"', b'"\xed\xa0\x80"', b'{"a": 1, "a": 2}', b"\xef\xbb\xbf", b"\0"),
    *(b"[" * 70 + b"]" * 70, b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 100_000),
)
"""Texts in place of a JSON value: numbers that no float holds, broken Unicode, a key twice, deep nesting."""

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null')
_TEMPLATE_TOKEN = re.compile(r"\{[{%#]-?|-?[}%#]\}|\w+|\s+|.")
_TEMPLATE_PARTS = (
    *("{{", "}}", "{%", "%}", "{#", "{% if x %}", "{% endif %}", "{% else %}", "{% endfor %}", "{% endmacro %}"),
    *("{% for x in range(99999) %}", "{% for x in messages %}", "{{ x.y.z }}", "{{ messages[0][1] }}", "{{ 1 / 0 }}"),
    *("{{ raise_exception('no') }}", "{{ raise_exception(1, 2) }}", "{{ strftime_now(1) }}", "{{ 'x' * 10 ** 12 }}"),
    *("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{{ [1"),
    *("{{ messages | tojson(indent=9) }}", "{{ '%s %d' % 1 }}", "{% set ns = namespace() %}{{ ns.x }}", "{% break %}"),
    *("{% generation %}", "{% endgeneration %}", "{% import 'os' as x %}", "{{ x | nofilter }}", "\0", "\ud7ff", "((("),
    *("{{ 9 ** 9 ** 9 }}", "{{ range(10 ** 9) }}", "{{ '{0:>999999999}'.format(1) }}", "(" * 400, "{% if 1 %}" * 400),
    *("{{ '%999999999d' % 1 }}", "{{ messages | batch(0) | list }}", "{{ 'x' | center(10 ** 12) }}", "{{ x() }}"),
    "{% set messages = [messages, messages] %}",
)


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """A few bytes changed, cut out, repeated, put in or left off at the end."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
        at = random.randrange(len(found) + 1)
        width = random.choice((1, 1, 2, 8, 100))
        kind = random.randrange(6)
        if kind == 0:
            found[at : at + width] = random.randbytes(width)
        elif kind == 1:
            del found[at : at + width]
        elif kind == 2:
            found[at:at] = found[at : at + width]
        elif kind == 3:
            found[at:at] = random.randbytes(width)
        elif kind == 4 and at < len(found):
            found[at] ^= 1 << random.randrange(8)
        elif kind == 5 and random.random() < 0.2:
            del found[at:]
    return bytes(found)


def mutate_document(random: Random, document: Any, words: Sequence[str] = TEXTS) -> Any:
    """A copy of a parsed JSON document with one value replaced, moved, or one entry removed, repeated or added.

    Args:
        words: keys that may be added, and texts that may stand for a value.
    """
    document = json.loads(json.dumps(document))
    places: list[tuple[Any, Any]] = []

    def visit(part: Any) -> None:
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                visit(part[key])

    visit(document)
    if not places:
        return random.choice(VALUES)
    part, key = random.choice(places)
    kind = random.randrange(9)
    if kind == 0:
        del part[key]
    elif kind == 1 and isinstance(part, list):
        part.insert(0, part[key])
    elif kind == 2 and isinstance(part, dict):
        part[random.choice((*TEXTS, *words))] = random.choice(VALUES)
    elif kind == 3 and isinstance(part[key], int | float):
        part[key] = part[key] + random.choice((-1, 1, 64))
    elif kind == 4:
        other, name = random.choice(places)
        part[key] = json.loads(json.dumps(other[name]))
    elif kind == 5:
        part[key] = random.choice(words)
    elif kind == 6 and isinstance(part, dict):
        part[random.choice((*TEXTS, *words))] = part.pop(key)
    elif kind == 7 and isinstance(part[key], list | str):
        part[key] = part[key] * random.choice((0, 2, 100))
    else:
        part[key] = random.choice(VALUES)
    return document


def mutate_json(random: Random, data: bytes, words: Sequence[str] = TEXTS) -> bytes:
    """JSON with other values or structure, with a text that is no such value, or with other bytes."""
    kind = random.randrange(8)
    if kind == 0:
        return mutate_bytes(random, data)
    if kind == 1:
        tokens = list(_TOKEN.finditer(data))
        if not tokens:
            return random.choice(RAW)
        token = random.choice(tokens)
        return data[: token.start()] + random.choice(RAW) + data[token.end() :]
    document = json.loads(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if isinstance(document, dict | list):
            document = mutate_document(random, document, words)
    return json.dumps(document).encode()


def mutate_template(random: Random, source: bytes) -> bytes:
    """A template with some of its tokens removed, repeated, exchanged, or hostile parts put in."""
    if random.random() < 0.2:
        return mutate_bytes(random, source)
    tokens = _TEMPLATE_TOKEN.findall(source.decode())
    for _ in range(random.choice((1, 1, 2, 4))):
        at, other = random.randrange(len(tokens)), random.randrange(len(tokens))
        kind = random.randrange(5)
        if kind == 0:
            tokens[at] = ""
        elif kind == 1:
            tokens[at] *= 2
        elif kind == 2:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        else:
            tokens[at] += random.choice(_TEMPLATE_PARTS)
    return "".join(tokens).encode()
