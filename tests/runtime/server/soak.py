"""Mixed requests without end: whether a server's memory grows (S13).

    python -m tests.runtime.server.soak 20000

The server runs in a process of its own, over a core that answers from a script, and says itself how much memory it has.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

import httpx

from flint_runtime.async_llm import AsyncLLM
from tests.runtime.fake_core import FakeCore, fake_engine
from tests.runtime.server.serving import QUESTION, says, serving

AT_ONCE = 16
CLAUDE_TOOL = {"name": "weather", "input_schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def serve(urls: Queue[str], stop: Event) -> None:
    """The server's process."""
    core = FakeCore(says("7 + 5 is 12.</think>" + "It is 12. " * 10))
    with AsyncLLM.from_factory(lambda: fake_engine(core)) as llm, serving(llm, max_body_bytes=1 << 20) as server:
        urls.put(server.url)
        stop.wait()


@contextmanager
def server_process() -> Iterator[str]:
    """A server in a process of its own: its address."""
    context = multiprocessing.get_context("spawn")
    urls, stop = context.Queue(), context.Event()
    process = context.Process(target=serve, args=(urls, stop))
    process.start()
    try:
        yield urls.get(timeout=60)
    finally:
        stop.set()
        process.join(30)


def body(drawn: random.Random, number: int) -> tuple[str, Any, int]:
    """A request of some kind: its path, its body, and the status that it must get."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number} " * drawn.randrange(1, 100)}]}
    kinds: list[tuple[str, Any, int]] = [
        ("/v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}, 200),
        ("/v1/chat/completions", {**chat, "tools": [TOOL], "logprobs": True, "top_logprobs": 2}, 200),
        ("/v1/chat/completions", {"messages": QUESTION, "n": 4, "stream": True, "tools": [TOOL]}, 200),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "echo": True, "stream": True}, 200),
        ("/v1/completions", {"prompt": "x", "stop": ["12"], f"unknown_{number}": 1}, 200),
        ("/v1/messages", {**chat, "max_tokens": 900, "stream": True, "tools": [CLAUDE_TOOL]}, 200),
        ("/v1/messages", {**chat, "max_tokens": "none"}, 400),
        ("/v1/responses", {"input": chat["messages"], "stream": True, "metadata": {"number": str(number)}}, 200),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_gone"}, 404),
        ("/tokenize", {"prompt": f"{number} " * 100}, 200),
        ("/v1/chat/completions", {"messages": "no list"}, 400),
        ("/v1/chat/completions", {"messages": QUESTION, "model": f"unknown-{number}"}, 404),
        ("/v1/completions", {"prompt": "x" * (1 << 20)}, 413),
    ]
    return drawn.choice(kinds)


async def send(url: str, first: int, count: int) -> None:
    """Requests of all kinds, some at once; one in eight is left before its end."""
    numbers = iter(range(first, first + count))

    async def some(drawn: random.Random, client: httpx.AsyncClient) -> None:
        for number in numbers:
            path, fields, status = body(drawn, number)
            async with client.stream("POST", path, json=fields) as response:
                assert response.status_code == status, (path, fields)
                async for _ in response.aiter_raw():
                    if drawn.random() < 0.125:
                        break

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(some(random.Random(first + i), client) for i in range(AT_ONCE)))


def resident_megabytes(url: str) -> float:
    """Of the server."""
    found = re.search(r"^process_resident_memory_bytes (\S+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found
    return float(found[1]) / 1e6


def growth(warm: int, count: int) -> float:
    """Megabytes by which a server grows over `count` requests, after `warm` ones."""
    with server_process() as url:
        asyncio.run(send(url, 0, warm))
        before = resident_megabytes(url)
        asyncio.run(send(url, warm, count))
        return resident_megabytes(url) - before


if __name__ == "__main__":
    print(f"{growth(2000, int(sys.argv[1])):.1f} MB")
