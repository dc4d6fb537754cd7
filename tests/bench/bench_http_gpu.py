"""What the HTTP server costs the full-size model on a GPU, by the wall clock (part of `make bench-gpu`).

    python -m tests.bench.bench_http_gpu --skeleton DIR

For 1, 8, 32 and 64 streams of 1,024 tokens and more: tokens per second from AsyncLLM alone, over HTTP, and over HTTP
with a tool offered that is never called. Random weights write random tokens, so only tokens of flint-nano's vocabulary
that are text may be drawn: every token is text to be parsed and sent. The client is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from flint_runtime.tokenizer import Tokenizer
from tests.bench.bench_serving import BATCHES, open_engine
from tests.runtime.chat.answers import TOOLS
from tests.runtime.server.serving import serving
from tests.shapes import NANO_DIRECTORY

SECONDS = 3.0
TOKENIZER = Tokenizer(NANO_DIRECTORY)
CONTENT = "The sum of seven and five. " * 60
"""About 1,024 tokens with the chat template."""
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": CONTENT}],
    "chat_template_kwargs": {"enable_thinking": False},
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 20_000,
    "stream": True,
}
HOPE = {"http": 0.95, "tools": 0.97}


def text_tokens() -> list[int]:
    """Tokens that are text: no markers, nothing special, whole characters."""
    return [
        token
        for token in range(TOKENIZER.vocab_size)
        if token not in TOKENIZER.markers and TOKENIZER.token_bytes(token).isascii() and not TOKENIZER.is_special(token)
    ]


def rate(llm: AsyncLLM, streams: int) -> float:
    """Tokens per second once all streams run."""
    while llm.snapshot()["running"] < streams or llm.snapshot()["generation_tokens"] == 0:
        time.sleep(0.05)
    time.sleep(0.5)
    begin, before = time.perf_counter(), llm.snapshot()["generation_tokens"]
    time.sleep(SECONDS)
    return float(llm.snapshot()["generation_tokens"] - before) / (time.perf_counter() - begin)


@contextmanager
def read_directly(llm: AsyncLLM, streams: int) -> Iterator[None]:
    """Streams from AsyncLLM, until the block ends."""
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=BODY["max_tokens"],
        allowed_token_ids=text_tokens(),
        output_kind=RequestOutputKind.DELTA,
    )

    async def one() -> None:
        messages = BODY["messages"]
        async with aclosing(llm.chat(messages, params, chat_template_kwargs={"enable_thinking": False})) as outputs:
            async for _ in outputs:
                pass

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(one()) for _ in range(streams)]
        while not done.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    done = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(all_of_them(),))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def client(url: str, body: bytes, streams: int, counts: Any) -> None:
    """Read streams until this process is ended; counts the bytes of each."""
    where = urlsplit(url)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)

    def one(index: int) -> None:
        with socket.create_connection((where.hostname, where.port)) as connection:  # type: ignore[arg-type]
            connection.sendall(head + body)
            first = connection.recv(1 << 16)
            assert first.startswith(b"HTTP/1.1 200"), first[:500]
            while piece := connection.recv(1 << 16):
                counts[index] += len(piece)

    for index in range(streams):
        threading.Thread(target=one, args=(index,)).start()


@contextmanager
def read_over_http(url: str, streams: int, tools: bool) -> Iterator[None]:
    """Streams over HTTP, until the block ends."""
    body = {**BODY, "allowed_token_ids": text_tokens()}
    if tools:
        body["tools"] = [dict(tool.definition) for tool in TOOLS.values()]
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", streams)
    process = context.Process(target=client, args=(url, orjson.dumps(body), streams, counts), daemon=True)
    process.start()
    try:
        yield
        assert min(counts) > 1_000, "some stream brought nothing"
    finally:
        process.kill()
        process.join()


def wait_until_idle(llm: AsyncLLM) -> None:
    """Until all requests have ended."""
    while llm.snapshot()["running"] or llm.snapshot()["waiting"]:
        time.sleep(0.05)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skeleton", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/flint-bench"))
    args = parser.parse_args()
    with open_engine(args.skeleton, "nvfp4", args.scratch) as executor:
        core = EngineCore(executor, CoreConfig())
        with AsyncLLM.from_factory(lambda: LLMEngine(core, executor, TOKENIZER)) as llm, serving(llm) as server:
            gc.collect()
            gc.freeze()
            for streams in BATCHES:
                found = {}
                with read_directly(llm, streams):
                    found["alone"] = rate(llm, streams)
                wait_until_idle(llm)
                for name in HOPE:
                    with read_over_http(server.url, streams, tools=name == "tools"):
                        found[name] = rate(llm, streams)
                    wait_until_idle(llm)
                http, tools = found["http"] / found["alone"], found["tools"] / found["http"]
                print(
                    f"{streams:2} streams: AsyncLLM {found['alone']:,.0f} tokens/s, HTTP {found['http']:,.0f} ({http:.3f}, "
                    f"at least {HOPE['http']}), with tools {found['tools']:,.0f} ({tools:.3f}, at least {HOPE['tools']})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
