"""Answers of a model, and what a parser makes of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flint_runtime.chat.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from flint_runtime.chat.parser import GlmParser
from flint_runtime.chat.tools import FunctionTool, parse_tools
from flint_runtime.tokenizer import MARKERS
from tests.runtime.fake_core import TOKENIZER

_IDS = {marker: token for token, marker in TOKENIZER.markers.items()}
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DEFINITIONS: list[dict[str, Any]] = [
    tool("now"),
    tool(
        "weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "limit": {"type": "number"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
            "until": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"enum": ["C", "F"]},
            "level": {"enum": [1, 2, "high"]},
        },
        **{"$defs": {"place": {"type": "object"}}},
    ),
    tool("write", {"path": {"type": "string"}, "content": {"type": "string"}}),
]
TOOLS: dict[str, FunctionTool] = parse_tools(DEFINITIONS)


@dataclass
class Answer:
    """What a model wrote: `{{…}}` around the name of a marker spells it with ordinary tokens."""

    text: str
    marks: list[tuple[int, int]]


def answer(written: str) -> Answer:
    """Every marker is a token, unless it is written with a backslash before it."""
    text, marks, position = "", [], 0
    for match in _MARKER.finditer(written):
        text += written[position : match.start()]
        position = match.start()
        if text.endswith("\\"):
            text = text[:-1]
        else:
            marks.append((len(text), _IDS[match[0]]))
        text += match[0]
        position = match.end()
    return Answer(text + written[position:], marks)


@dataclass
class Reading:
    """All events of an answer, put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[Any]] = field(default_factory=list)
    """Of each: name, arguments as text, whether it ended."""
    ids: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ReasoningText(text):
                    assert text
                    self.reasoning += text
                case ContentText(text):
                    assert text
                    self.content += text
                case CallStart(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append([name, "", False])
                    self.ids.append(call_id)
                case CallArguments(index, text):
                    assert text and index == len(self.calls) - 1 and not self.calls[index][2]
                    self.calls[index][1] += text
                case CallEnd(index):
                    assert index == len(self.calls) - 1
                    self.calls[index][2] = True


def read(
    written: str | Answer,
    cuts: Sequence[int] = (),
    *,
    end: str = "stop",
    stop_reason: int | str | None = None,
    thinking: bool = False,
    calls: bool = True,
    tools: dict[str, FunctionTool] = TOOLS,
) -> Reading:
    """Parse an answer in the pieces that cuts at these places make."""
    given = answer(written) if isinstance(written, str) else written
    parser = GlmParser(TOKENIZER, tools, thinking=thinking, calls=calls)
    reading = Reading()
    for first, last in zip((0, *cuts), (*cuts, len(given.text)), strict=True):
        marks = [mark for mark in given.marks if first <= mark[0] < last]
        reading.add(parser.feed(given.text[first:last], (), marks))
    reading.add(parser.finish(end, stop_reason))
    assert parser.num_calls == len(reading.calls)
    return reading


def is_beginning_of_object(text: str) -> bool:
    """Whether a text is the beginning of a JSON object, or all of it."""
    opened, quoted, escaped = "", False, False
    for position, character in enumerate(text):
        if quoted:
            quoted, escaped = escaped or character != '"', not escaped and character == "\\"
        elif character == '"':
            quoted = True
        elif character in "{[":
            opened += character
        elif character in "}]":
            if not opened or opened[-1] + character not in ("{}", "[]"):
                return False
            opened = opened[:-1]
            if not opened and position != len(text) - 1:
                return False
    return not text or text[0] == "{"


_WORDS = (
    *(
        "Let me see.",
        "7 + 5 = 12",
        "\n\n",
        " ",
        "Wörter, 字, 🙂 and e\u0301",
        "\r\n",
        "'\"\\",
        "\u2028",
        "\x00",
        "<tool",
    ),
    *(
        "if (a < b && c) {\n\treturn 1;\n}",
        "\\<tool_call>",
        "\\</think>",
        "\\</arg_value>",
        '{"a": 1}',
        "```py\nx\n```",
    ),
)
_VALUES = {
    "city": ("Paris", ' "Paris" ', "\n indented\n\n", "5", "null", "東京", "", "a<b>&c", "\\</arg_value> \\<arg_key>"),
    "days": ("1", " 12 ", "three", "007", "9" * 5000, "-3", "1.0", "1e400"),
    "limit": ("1e3", "0.5", "nan", "Infinity", "-2", "1_000", ".5"),
    "metric": ("true", "True", "yes", "FALSE"),
    "tags": ('["a", "b"]', "[1, NaN]", "a, b", "[" * 5000),
    "where": ('{"lat": 1.5, "name": "x\\ud800"}', "{'a': 1}", "{}"),
    "note": ("null", "text", ' "x"'),
    "until": ("null", "tomorrow"),
    "unit": ("C", "K"),
    "level": ("1", "high"),
    "other": ("5", '"x"', "plain", "[1]", "NaN", "True"),
}


def random_answer(seed: int) -> str:
    """One with all that a model writes, well and sloppily, as `answer` takes it."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return "".join(draw.choice(_WORDS) for _ in range(draw.randrange(most + 1)))

    def call() -> str:
        name = draw.choice(("now", "weather", "weather", "write", "missing", " weather\n", "weather</arg_value>", ""))
        if draw.random() < 0.1:
            body = json.dumps({"name": draw.choice(("now", "weather", "x")), "arguments": {"city": "Paris"}})
            return f"<tool_call>{body}</tool_call>"
        pairs = ""
        for _ in range(draw.randrange(4)):
            key = draw.choice(list(_VALUES))
            end = draw.choice(("</arg_value>", "</arg_value>", "</arg_value>\n", ""))
            pairs += f"<arg_key>{key}</arg_key><arg_value>{draw.choice(_VALUES[key])}{end}"
        return f"<tool_call>{name}{pairs}" + draw.choice(("</tool_call>", "</tool_call>", "</tool_call>\n", ""))

    parts = [words(3) + draw.choice(("</think>", "</think>", ""))]
    for _ in range(draw.randrange(4)):
        parts.append(
            draw.choice((words(3), call(), call(), f"<think>{words(2)}</think>", "</tool_call>", "<arg_value>"))
        )
    return "".join(parts)


def mutated(written: str, seed: int) -> str:
    """An answer with pieces lost, doubled, exchanged or inserted."""
    draw = random.Random(seed)
    pieces = [piece for piece in re.split(f"({_MARKER.pattern})", written) if piece]
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(pieces) + 1)
        change = draw.randrange(4)
        if change == 0 and at < len(pieces):
            del pieces[at]
        elif change == 1 and at < len(pieces):
            pieces.insert(draw.randrange(len(pieces)), pieces[at])
        elif change == 2:
            pieces.insert(at, draw.choice(MARKERS))
        elif pieces:
            other = draw.randrange(len(pieces))
            pieces[at % len(pieces)] = pieces[other][: draw.randrange(len(pieces[other]) + 1)]
    found = "".join(pieces)
    return found[: draw.randrange(len(found) + 1)] if draw.random() < 0.3 else found
