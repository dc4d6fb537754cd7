"""What the chat parser costs per token, in microseconds: in plain text, and inside arguments of growing size.

    python -m tests.bench.bench_chat_parser [--repeat N]

Every token is fed alone, as a stream does. CPU time, the best of N runs. It must not grow with the length.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from flint_runtime.chat.parser import GlmParser
from flint_runtime.chat.tools import parse_tools
from flint_runtime.tokenizer import Tokenizer
from tests.shapes import NANO_DIRECTORY

WORDS = ("def", " word", " é", ' "x"', "\n    ", " return", "<", " and", "\\n", ".")
SIZES = (1_000, 10_000, 100_000, 1_000_000)
BUDGET_US = {"text": 3.0, "reasoning": 3.0, "string": 6.0, "object": 6.0}
SCHEMA = {"type": "object", "properties": {"string": {"type": "string"}, "object": {"type": "object"}}}
TOOLS = parse_tools([{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}])


def tokens(size: int) -> list[str]:
    """Texts of tokens, of `size` characters in all."""
    count = size * len(WORDS) // len("".join(WORDS))
    return [WORDS[i % len(WORDS)] for i in range(count)]


def measure(tokenizer: Tokenizer, kind: str, texts: Sequence[str]) -> float:
    """Microseconds per token, the end of the part included."""
    ids = {text: i for i, text in tokenizer.markers.items()}
    parser = GlmParser(tokenizer, TOOLS, thinking=kind == "reasoning")
    offset = 0
    if kind in ("string", "object"):
        for text in ("<tool_call>", "write", "<arg_key>", kind, "</arg_key>", "<arg_value>"):
            parser.feed(text, [ids.get(text, 1)], [(offset, ids[text])] if text in ids else [])
            offset += len(text)
    end = "</arg_value>" if kind in ("string", "object") else "</think>"
    offset += sum(map(len, texts))
    start = time.thread_time()
    for text in texts:
        parser.feed(text, (1,), ())
    parser.feed(end, [ids[end]], [(offset, ids[end])])
    parser.finish("length")
    return (time.thread_time() - start) / (len(texts) + 1) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    tokenizer = Tokenizer(NANO_DIRECTORY)
    print(f"{'us per token':12}" + "".join(f"{size:>12,}" for size in SIZES) + "      at most")
    for kind, budget in BUDGET_US.items():
        found = [min(measure(tokenizer, kind, tokens(size)) for _ in range(repeat)) for size in SIZES]
        print(f"{kind:12}" + "".join(f"{us:12.2f}" for us in found) + f"{budget:13.1f}")


if __name__ == "__main__":
    main()
