"""What a streamed token costs the HTTP server beyond AsyncLLM alone: processor time of one process, on one core.

    python -m tests.bench.bench_http

An engine that answers at once gives a token to each of 16 streams at every step, which waits until all were taken, as a
GPU would have them wait. The same requests are run twice: read from `AsyncLLM` in the server's process, and as chat
completions over real sockets, read by a process of their own. The difference of the server's processor time, over all
tokens, is the server: parser, chunks, sockets. The best of five runs counts: others use this machine, too.
Exit code 1 if the limit is missed.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import socket
import sys
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import orjson
import uvloop
from starlette.types import Receive, Scope, Send

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fake_core import TOKENIZER, FakeCore, fake_engine
from tests.runtime.server.serving import QUESTION, running, serving

LIMIT_US = 20.0
STREAMS = 16
TOKENS = 900
ROUNDS = 5
STEP_SECONDS = 0.001
CHUNK_BYTES = 230
TEXT = "7 + 5 is 12, which is a sum.</think>" + "The answer is 12, as far as I can say. " * 200


def answer_ids() -> list[int]:
    """Of every stream: a thought, then content without an end."""
    return TOKENIZER.encode(TEXT)[:TOKENS]


async def read_directly(llm: AsyncLLM) -> int:
    """All streams from AsyncLLM: how many tokens came."""
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)

    async def one(index: int) -> int:
        count = 0
        async with aclosing(llm.chat(QUESTION, replace(params, seed=index))) as outputs:
            async for output in outputs:
                count += len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*(one(index) for index in range(STREAMS))))


def read_over_http(url: str, ready: Event, go: Event) -> None:
    """All streams as a client: bytes only, so that this process is no hindrance."""
    where = urlsplit(url)
    body = orjson.dumps({"messages": QUESTION, "stream": True})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )

    def one() -> None:
        with socket.create_connection((where.hostname, where.port)) as connection:  # type: ignore[arg-type]
            connection.sendall(head + body)
            data = bytearray()
            while piece := connection.recv(1 << 16):
                data += piece
            assert data.startswith(b"HTTP/1.1 200") and b"[DONE]" in data

    threads = [threading.Thread(target=one) for _ in range(STREAMS)]
    ready.set()
    go.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that only sends: as many pieces, as large and as often."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(TOKENS):
        await asyncio.sleep(STEP_SECONDS)
        await send({"type": "http.response.body", "body": b"x" * CHUNK_BYTES, "more_body": True})
    await send({"type": "http.response.body", "body": b"[DONE]"})


async def sleep_only() -> None:
    """What `bare` does without sending."""

    async def one() -> None:
        for _ in range(TOKENS):
            await asyncio.sleep(STEP_SECONDS)

    await asyncio.gather(*(one() for _ in range(STREAMS)))


def processor_seconds_of_clients(url: str) -> float:
    """Processor time of this process while another one reads all streams."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    client = context.Process(target=read_over_http, args=(url, ready, go))
    client.start()
    ready.wait()
    begin = time.process_time()
    go.set()
    client.join()
    assert client.exitcode == 0
    return time.process_time() - begin


def measure_bare() -> float:
    """Microseconds per token of `bare`: what uvicorn and the system's sockets cost here."""
    begin = time.process_time()
    uvloop.run(sleep_only())
    alone = time.process_time() - begin
    with running(bare) as url:
        return (processor_seconds_of_clients(url) - alone) / (STREAMS * TOKENS) * 1e6


def measure() -> tuple[float, float]:
    """Microseconds of processor time per token: AsyncLLM alone, and with the server."""
    ids = answer_ids()
    core = FakeCore(lambda request: ids)
    core.before_step = lambda: time.sleep(STEP_SECONDS)
    total = STREAMS * len(ids)
    with AsyncLLM.from_factory(lambda: fake_engine(core)) as llm:
        gc.collect()
        gc.freeze()
        begin = time.process_time()
        assert uvloop.run(read_directly(llm)) == total
        alone = time.process_time() - begin
        with serving(llm) as server:
            served = processor_seconds_of_clients(server.url)
    return alone / total * 1e6, served / total * 1e6


def main() -> int:
    """Measure and print."""
    rounds = [(*measure(), measure_bare()) for _ in range(ROUNDS)]
    alone, served, least = (min(values) for values in zip(*rounds, strict=True))
    cost = served - alone
    print(
        f"{STREAMS} streams: AsyncLLM alone {alone:.1f} us a token, served {served:.1f} us: the server {cost:.1f} us "
        f"(at most {LIMIT_US:.0f}); an ASGI application that only sends {least:.1f} us"
    )
    return int(cost > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
