"""What a prompt adds to the time to the first token, in milliseconds of one request alone.

    python -m tests.bench.bench_prompt [--repeat N]

A coding agent's conversation of 1,000 and of 100,000 tokens (4 characters each, as a large vocabulary has; flint-nano
makes three of each such four characters, so what grows with the tokens is dearer here), first seen, and again with the
next turn. "prepared" is messages to a checked request, of which "tokens" is the encoding alone; "HTTP" is from the
first byte of the body to the first token, with a core that answers at once. The best of N runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.tokenizer import Tokenizer
from tests.runtime.fake_core import EOS, FakeCore, fake_engine
from tests.runtime.server.serving import serving
from tests.shapes import NANO_DIRECTORY
from tests.tools.conversations import AGENT_RULES, BASH, EDIT, calls, result, system, user

AT_MOST_MS = {("1K", "first"): 3, ("100K", "first"): 350, ("100K", "next turn"): 20}
CHARACTERS = {"1K": 4_000, "100K": 400_000}
TOOLS = [BASH, EDIT]
ONE_TOKEN = SamplingParams(max_tokens=1)
Messages = list[dict[str, Any]]


def turn(number: int) -> Messages:
    """What an agent adds: a call of some hundred characters, and a result of some thousand."""
    source = "".join(f"def f{number}_{i}(x):\n    return [x + {i}, 'item {i}']\n" for i in range(8))
    arguments = json.dumps({"file_path": f"/repo/f{number}.py", "old_string": "pass", "new_string": source})
    return [
        calls(("Edit", arguments), content=f"Step {number}.", reasoning=f"File {number} needs a function."),
        result("".join(f"{i}: line {i * number} of the file, which is as long as lines are\n" for i in range(25))),
    ]


def conversation(characters: int) -> Messages:
    """An agent's messages, of so many characters in all."""
    messages = [system(AGENT_RULES), user("Write functions.")]
    while len(json.dumps(messages)) + len(json.dumps(TOOLS)) < characters:
        messages += turn(len(messages))
    return messages


def milliseconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def fresh() -> tuple[LLMEngine, Tokenizer]:
    """An engine that has seen nothing; its core answers at once."""
    core = FakeCore(lambda request: [EOS])
    core.max_model_len = 1 << 20
    tokenizer = Tokenizer(NANO_DIRECTORY)
    return fake_engine(core, tokenizer), tokenizer


def measure(characters: int) -> dict[tuple[str, str], float]:
    """By ("prepared", "first") and so on."""
    messages = conversation(characters)
    longer = messages + turn(len(messages))
    engine, tokenizer = fresh()
    engine.prepare_chat("r", [user("Hi")], ONE_TOKEN)  # what only the first request of all waits for
    alone = Tokenizer(NANO_DIRECTORY)
    found = {}
    for when, said in (("first", messages), ("next turn", longer)):
        found["prepared", when] = milliseconds(partial(engine.prepare_chat, "r", said, ONE_TOKEN, TOOLS))
        text = tokenizer.render_chat(said, TOOLS)
        found["tokens", when] = milliseconds(partial(alone.encode, text))
    engine, _ = fresh()
    with AsyncLLM.from_factory(lambda: engine) as llm, serving(llm, max_body_bytes=64 << 20) as server:
        server.chat(max_tokens=1)  # the connection
        for when, said in (("first", messages), ("next turn", longer)):
            body = json.dumps({"messages": said, "tools": TOOLS, "max_tokens": 1, "tool_choice": "none"}).encode()
            post = partial(server.client.post, "/v1/chat/completions", content=body)
            found["HTTP", when] = milliseconds(lambda: post().raise_for_status())  # noqa: B023 (called at once)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print(f"{'ms':16}{'prepared':>10}{'tokens':>10}{'HTTP':>10}   at most")
    for size, characters in CHARACTERS.items():
        runs = [measure(characters) for _ in range(repeat)]
        for when in ("first", "next turn"):
            row = [min(run[what, when] for run in runs) for what in ("prepared", "tokens", "HTTP")]
            budget = AT_MOST_MS.get((size, when))
            print(f"{size + ', ' + when:16}" + "".join(f"{ms:10.1f}" for ms in row) + f"{budget or '-':>10}")


if __name__ == "__main__":
    main()
