"""A server in a thread of the test's process, and what tests ask it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.request import EngineRequest
from flint_runtime.server.app import create_app
from flint_runtime.server.service import Service
from flint_runtime.server.settings import ServerSettings
from tests.runtime.fake_core import EOS, TOKENIZER, FakeCore

MODEL = "flint-nano"
QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]


@dataclass
class Served:
    """A running server."""

    url: str
    llm: AsyncLLM
    service: Service
    client: httpx.Client

    def chat(self, **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        return self.client.post("/v1/chat/completions", json={"messages": QUESTION, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self.client.post("/v1/completions", json={"prompt": "7 + 5", **fields})

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The data of all events of a stream; the last one, [DONE], is checked and left out."""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return events(response.iter_lines())

    def chat_stream(self, **fields: Any) -> list[Any]:
        """The chunks of a streamed chat."""
        return self.stream("/v1/chat/completions", **{"messages": QUESTION, **fields})


def events(lines: Iterator[str]) -> list[Any]:
    """The data of a stream's events, which must end with [DONE]."""
    found = [line.removeprefix("data: ") for line in lines if line and not line.startswith(":")]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]


@contextmanager
def serving(llm: AsyncLLM, **settings: Any) -> Iterator[Served]:
    """Serve until the block ends."""
    app = create_app(llm, ServerSettings(**{"model_names": (MODEL,), **settings}))
    limits = httpx.Limits(max_connections=None)
    with running(app) as url, httpx.Client(base_url=url, timeout=30, limits=limits) as client:
        yield Served(url, llm, app.state.service, client)


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Run an ASGI application until the block ends: its address."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        bound.close()
        assert not thread.is_alive()


def says(text: str) -> Callable[[EngineRequest], Sequence[int]]:
    """A core's answer to every request: a text and the end."""
    ids = [*TOKENIZER.encode(text), EOS]
    return lambda request: ids


def endless(core: FakeCore) -> None:
    """Let answers run to max_tokens, slowly enough to act in between."""
    core.answer = lambda request: [5] * request.max_tokens
    core.before_step = lambda: time.sleep(0.002)


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait for a function to return something true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
