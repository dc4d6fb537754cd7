"""Clients that leave, engines that fail: nobody hangs, nothing leaks, no stream ends as if all were well."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.request import CoreOutput
from tests.runtime.fake_core import FakeCore, fake_engine
from tests.runtime.server.serving import QUESTION, Served, endless, serving, until


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_s1_a_client_that_leaves(server: Served, core: FakeCore, path: str, stream: bool, n: int) -> None:
    endless(core)
    body: dict[str, Any] = {"stream": stream, "max_tokens": 900, "n": n}
    body |= {"messages": QUESTION} if "chat" in path else {"prompt": ["a", "b"]}
    requests = n if "chat" in path else 2 * n
    with httpx.Client(base_url=server.url) as client:
        if stream:
            with client.stream("POST", path, json=body) as response:
                next(response.iter_raw())
                steps = core.steps
        else:
            with pytest.raises(httpx.TimeoutException):
                client.post(path, json=body, timeout=0.3)
            steps = core.steps
    until(lambda: len(core.aborted) == requests)
    # What passes between the two processor threads until the server hears of it, and one step more.
    assert core.steps <= steps + 25 and not core.running
    until(lambda: server.service.load == 0 and server.llm.snapshot()["running"] == 0)


def test_s1_a_client_that_leaves_before_its_request_is_there(server: Served) -> None:
    import socket
    from urllib.parse import urlsplit

    where = urlsplit(server.url)
    for sent in (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{", b"POST /v1", b""):
        with socket.create_connection((where.hostname, where.port)) as connection:  # type: ignore[arg-type]
            connection.sendall(sent)
            time.sleep(0.05)
    until(lambda: server.service.load == 0)
    assert server.chat().status_code == 200


@pytest.fixture
def mortal() -> Iterator[tuple[FakeCore, Served]]:
    """A server whose engine a test may end."""
    core = FakeCore()
    endless(core)
    with AsyncLLM.from_factory(lambda: fake_engine(core)) as llm, serving(llm, stuck_seconds=0.5) as server:
        yield core, server


def failing_stream(server: Served, begin: Any) -> list[str]:
    """The lines of a stream during which something happens."""
    with server.client.stream("POST", "/v1/chat/completions", json={"messages": QUESTION, "stream": True}) as response:
        lines = response.iter_lines()
        found = [next(lines)]
        begin()
        return [*found, *lines]


def test_s3_s10_the_engine_dies(mortal: tuple[FakeCore, Served]) -> None:
    """Streams end with an error event, others with 503; what comes later is refused, and /health says so."""
    core, server = mortal
    whole: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: whole.append(server.complete(max_tokens=900)))
    waiting.start()
    until(lambda: core.running)
    assert server.client.get("/health").status_code == 200
    lines = failing_stream(server, lambda: setattr(core, "fail", RuntimeError("the device is gone")))
    waiting.join()
    data = [line for line in lines if line.startswith("data: ")]
    assert '"error"' in data[-2] and "engine died" in data[-2] and data[-1] == "data: [DONE]"
    assert not any('finish_reason":"' in line for line in data)
    assert whole[0].status_code == 503 and whole[0].headers["retry-after"]
    for response in (server.chat(), server.chat(stream=True), server.client.get("/health"), server.client.get("/ping")):
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
    assert server.client.get("/metrics").status_code == 200


def test_s3_the_engine_hangs(mortal: tuple[FakeCore, Served]) -> None:
    """After a while everybody is told; once it goes on, requests are served again."""
    core, server = mortal
    free = threading.Event()
    whole: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: whole.append(server.complete(max_tokens=900)))
    waiting.start()
    until(lambda: core.running)
    try:
        lines = failing_stream(server, lambda: setattr(core, "before_step", lambda: free.wait(20) and None))
        waiting.join(10)
        assert "hangs" in lines[-4] + lines[-3] and whole[0].status_code == 503
        for response in (server.chat(), server.client.get("/health")):
            assert response.status_code == 503 and "hangs" in response.json()["error"]["message"]
    finally:
        free.set()
    until(lambda: server.client.get("/health").status_code == 200)
    core.answer = lambda request: [5]
    assert server.chat().status_code == 200


def test_s8_one_request_fails(server: Served, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole: 500. Streamed: an error event behind what came. The others go on."""
    step = FakeCore._next

    def fail(self: FakeCore, request: Any, left: list[int]) -> CoreOutput:
        output = step(self, request, left)
        if request.params.seed == 666 and len(left) < 5:
            self.running.pop(request.request_id, None)
            return CoreOutput(request.request_id, (), "error", "The logits are not finite.")
        return output

    monkeypatch.setattr(FakeCore, "_next", fail)
    response = server.chat(seed=666)
    assert response.status_code == 500 and response.json()["error"]["message"] == "The logits are not finite."
    data = server.chat_stream(seed=666)
    assert data[-1]["error"]["message"] == "The logits are not finite."
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in data[:-1]) == "It is"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in data[:-1])
    assert server.chat().status_code == 200


def test_s10_a_bug_in_the_middle_of_a_stream(
    server: Served, core: FakeCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flint_runtime.server.generation import Generation

    read, calls = Generation._read, [0]

    def fail(self: Generation, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3:
            raise ZeroDivisionError("secret")
        return read(self, *arguments)

    monkeypatch.setattr(Generation, "_read", fail)
    core.before_step = lambda: time.sleep(0.005)
    data = server.chat_stream()
    assert data[-1]["error"]["type"] == "server_error" and "secret" not in str(data)
    assert "ZeroDivisionError: secret" in caplog.text
    until(lambda: server.llm.snapshot()["running"] == 0)


def test_a_silent_stream_says_that_it_lives(shared: tuple[FakeCore, Served], core: FakeCore) -> None:
    """Also before its first token."""
    core.before_step = lambda: time.sleep(0.25)
    core.answer = lambda request: [5, 5]
    with (
        serving(shared[1].llm, idle_seconds=0.1) as server,
        server.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}
        ) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    assert lines[0].startswith(":") and sum(line.startswith(":") for line in lines) >= 4
    assert lines[-1] == "data: [DONE]" and sum(line.startswith("data: {") for line in lines) == 2


def test_s2_two_hundred_cancels_at_random(server: Served, core: FakeCore) -> None:
    """Whole and streamed, at any moment: what the neighbours get does not change."""
    from tests.runtime.fake_core import echo

    core.answer = echo
    core.before_step = lambda: time.sleep(0.0005)
    drawn = random.Random(7)

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:

            async def neighbour(i: int) -> str:
                body = {"prompt": f"neighbour {i} " * 8, "max_tokens": 200}
                return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

            async def doomed(stream: bool, seconds: float) -> None:
                body = {"prompt": "so many words " * 40, "max_tokens": 900, "stream": stream}
                try:
                    async with (
                        asyncio.timeout(seconds),
                        client.stream("POST", "/v1/completions", json=body) as response,
                    ):
                        async for _ in response.aiter_raw():
                            pass
                except TimeoutError:
                    pass

            neighbours = [asyncio.create_task(neighbour(i)) for i in range(8)]
            await asyncio.gather(*(doomed(drawn.random() < 0.5, drawn.uniform(0, 0.4)) for _ in range(200)))
            assert [await task for task in neighbours] == [f"neighbour {i} " * 8 for i in range(8)]

    asyncio.run(main())
    until(lambda: server.service.load == 0 and server.llm.snapshot()["running"] == 0)
    assert server.chat().status_code == 200
