"""Answers for tests of the parser: written as text with markers, fed in any pieces, and read back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from flint_runtime.chat.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from flint_runtime.chat.parser import GlmParser
from flint_runtime.chat.tools import FunctionTool, parse_tools
from flint_runtime.tokenizer import MARKERS, Tokenizer
from tests.shapes import NANO_DIRECTORY

TOKENIZER = Tokenizer(NANO_DIRECTORY)
IDS = {text: i for i, text in TOKENIZER.markers.items()}
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "list": {"type": "array", "items": {}},
    "map": {"type": "object"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "unit": {"enum": ["C", "F"]},
    "level": {"enum": [1, 2]},
    "linked": {"$ref": "#/$defs/whole"},
    "open": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"whole": {"type": "integer"}}}
TOOLS: dict[str, FunctionTool] = parse_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("weather", SCHEMA), ("now", None), ("now_utc", {}), ("write", SCHEMA))
    ]
)

Piece = tuple[str, bool]
"""A text, and whether it is a marker token."""


def pieces(source: str) -> list[Piece]:
    """An answer's pieces. Markers are tokens; `\\x01<think>` spells one by ordinary tokens."""
    found: list[Piece] = []
    text, i = "", 0
    while i < len(source):
        marker = next((m for m in MARKERS if source.startswith(m, i)), None)
        if source[i] == "\x01":
            text, i = text + source[i + 1], i + 2
        elif marker is None:
            text, i = text + source[i], i + 1
        else:
            found += [(text, False)] if text else []
            found.append((marker, True))
            text, i = "", i + len(marker)
    return [*found, (text, False)] if text else found


@dataclass
class Parsed:
    """What a client puts together from events."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    reasoning_tokens: int = 0

    def same(self) -> tuple[Any, ...]:
        """Everything but the calls' ids."""
        return self.reasoning, self.content, self.calls, self.ended, self.reasoning_tokens


def collect(events: Iterable[Event]) -> Parsed:
    found = Parsed()
    for event in events:
        if isinstance(event, ReasoningText):
            found.reasoning += event.text
        elif isinstance(event, ContentText):
            found.content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(found.calls)
            found.calls.append([event.name, ""])
            found.ids.append(event.call_id)
        elif isinstance(event, CallArguments):
            assert event.index == len(found.calls) - 1 and event.index not in found.ended
            found.calls[event.index][1] += event.text
        elif isinstance(event, CallEnd):
            found.ended.append(event.index)
    return found


def parse(
    source: str | list[Piece],
    finish: Any = "stop",
    *,
    cuts: int | Iterable[int] | None = None,
    thinking: bool = False,
    calls: bool = True,
    tools: dict[str, FunctionTool] | None = None,
    stop_reason: int | str | None = None,
) -> Parsed:
    """Parse an answer whole, or with `cuts` in pieces of that many characters, or of these sizes and the rest."""
    found = pieces(source) if isinstance(source, str) else source
    text = "".join(piece for piece, _ in found)
    marks, ids, starts, offset = [], [], [], 0
    for piece, marker in found:
        if marker:
            marks.append((offset, IDS[piece]))
            ids.append(IDS[piece])
            starts.append(offset)
        else:  # a token of each character
            ids += [1] * len(piece)
            starts += range(offset, offset + len(piece))
        offset += len(piece)
    parser = GlmParser(TOKENIZER, TOOLS if tools is None else tools, thinking=thinking, calls=calls)
    events: list[Event] = []
    sizes = repeat(cuts) if isinstance(cuts, int) else iter(cuts or ())
    at = token = mark = 0
    while at < len(text):
        end = at + next(sizes, len(text))
        next_token, next_mark = token, mark
        while next_token < len(ids) and starts[next_token] < end:
            next_token += 1
        while next_mark < len(marks) and marks[next_mark][0] < end:
            next_mark += 1
        events += parser.feed(text[at:end], ids[token:next_token], marks[mark:next_mark])
        at, token, mark = end, next_token, next_mark
    events += parser.finish(finish, stop_reason)
    result = collect(events)
    result.reasoning_tokens = parser.reasoning_tokens
    assert parser.num_calls == len(result.calls)
    return result


_TEXTS = (
    "Let me see.\n\n", "  \n", "", "Grüße 👩‍🚀 \u2028", "def f(x):\n\n    return x < 1 & 2\t\n", '{"a": "b\\n"}', "5",
    "[1, {\"a\": null}]", "null", "True", "three", "1e3", "nan", "-7", "12345678901234567890123", "\x01<tool_call>now",
    "a \x01</arg_value> b", "\x01</think>", "'\"\\\x08\x00", "if a <", "é\n", " C", "F", "[1e999]", '"\\ud800"',
)  # fmt: skip


def random_answer(seed: int) -> tuple[str, bool, str]:
    """An answer as models write them, its thinking flag, and how it ended; the same for the same seed."""
    draw = random.Random(seed)
    thinking = draw.random() < 0.6
    parts = [draw.choice(_TEXTS), draw.choice(("</think>", "</think>\n", ""))] if thinking else []
    for _ in range(draw.randint(0, 4)):
        kind = draw.random()
        if kind < 0.5:
            name = draw.choice(("weather", "write", "now", "now_utc", "unknown", "weather</arg_value>", "write\n"))
            keys = [draw.choice([*PROPERTIES, "other"]) for _ in range(draw.randint(0, 4))]
            body = "".join(
                f"<arg_key>{key}</arg_key>{draw.choice(('', '', chr(10)))}<arg_value>{draw.choice(_TEXTS)}</arg_value>"
                for key in keys
            )
            parts.append(f"<tool_call>{name}{body}{draw.choice(('</tool_call>', '</tool_call>', chr(10)))}")
        elif kind < 0.6:
            arguments = json.dumps({"city": draw.choice(_TEXTS).replace("\x01", "")})
            parts.append(f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
        elif kind < 0.7:
            parts.append(f"<think>{draw.choice(_TEXTS)}</think>")
        else:
            parts.append(draw.choice(_TEXTS) + draw.choice(_TEXTS))
    source = "".join(parts)
    if draw.random() < 0.2:
        return source[: draw.randint(0, len(source))].removesuffix("\x01"), thinking, "length"
    return source, thinking, "stop"
