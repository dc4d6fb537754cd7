"""What the parser costs per token, in text and inside a long argument.

    python -m tests.bench.bench_parser

A token is four characters; one token a call, as a stream brings them. Best of five runs, processor time.
"""

from __future__ import annotations

import time

from flint_runtime.chat.parser import GlmParser
from tests.runtime.chat.answers import TOOLS, answer
from tests.runtime.fake_core import TOKENIZER

_GOALS = {"text": 3.0, "argument": 6.0}
"""Microseconds per token."""
_SIZES = (1_000, 10_000, 100_000)
"""Characters."""


def microseconds(opening: str, characters: int) -> float:
    """Per token of a text behind `opening`."""
    start = answer(opening)
    text = ('if x < y: return "z"\n' * (characters // 20))[:characters]
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    best = float("inf")
    for _ in range(5):
        parser = GlmParser(TOKENIZER, TOOLS, thinking=False)
        parser.feed(start.text, (), start.marks)
        begin = time.process_time()
        for piece in pieces:
            parser.feed(piece, (5,), ())
        best = min(best, time.process_time() - begin)
    return best / len(pieces) * 1e6


def main() -> None:
    openings = {"text": "Hi", "argument": "<tool_call>write<arg_key>content</arg_key><arg_value>"}
    for name, opening in openings.items():
        found = ", ".join(f"{size:,} characters {microseconds(opening, size):.2f}" for size in _SIZES)
        print(f"{name}: {found} µs a token (at most {_GOALS[name]:g})")


if __name__ == "__main__":
    main()
