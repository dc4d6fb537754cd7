"""GenerationEndpoint: one POST that ends in generated tokens, streamed or whole, for every API alike.

Admission, the body, a client that leaves, an engine that fails, silence in a stream: all of it is here, and an `Api`
only says what to ask the engine and how its answer looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from flint_runtime.llm_engine import Prompt
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.server.body import ClientGoneError, parse_body, read_body
from flint_runtime.server.errors import ErrorReply, error_reply
from flint_runtime.server.generation import Batch, Generation, MakeParser
from flint_runtime.server.protocol.common import RequestModel
from flint_runtime.server.replies import JSON, send_body, send_error, start
from flint_runtime.server.service import Place, Service, new_id, usable_id

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather a stream
]


class Format(Protocol):
    """How an API says what came. Everything returned is bytes for the wire, possibly none."""

    idle: bytes
    """What a silent stream says."""

    def batch(self, batch: Batch) -> bytes:
        """Events of a stream."""

    def end(self) -> bytes:
        """The last events of a stream that succeeded."""

    def failed(self, error: ErrorReply) -> bytes:
        """The last events of a stream that failed in the middle."""

    def whole(self, batches: list[Batch]) -> bytes:
        """The body of an answer that is not streamed; the batches are the last ones of every prompt."""

    def error_body(self, error: ErrorReply) -> bytes:
        """The body of an answer that is an error."""


@dataclass(frozen=True)
class Plan:
    """What to ask the engine, and how to say what it answers."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    stream: bool
    make_format: Any
    """Called with the Generation: a Format."""
    make_parser: MakeParser | None = None
    options: dict[str, Any] | None = None
    """More arguments of `AsyncLLM.prepare`."""


class Api(Protocol):
    """An API that generates."""

    id_prefix: str

    @property
    def model(self) -> type[RequestModel]:
        """Of its bodies."""

    def plan(self, service: Service, body: Any, request_id: str) -> Plan:
        """What a body asks for. Called in a thread. Raises FlintError."""

    def error_body(self, error: ErrorReply) -> bytes:
        """The body of an answer that is an error."""


class GenerationEndpoint:
    """An ASGI application."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service, self._api = service, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = _Exchange(scope, send, self._service.settings.idle_seconds)
        try:
            with self._service.place() as place, _ended_from_outside(place):
                body = await read_body(scope, receive, self._service.settings.max_body_bytes)
                async with _until_the_client_leaves(receive):
                    await self._serve(exchange, place, body)
        except ClientGoneError:
            pass
        except Exception as error:
            reply = error_reply(error)
            if exchange.format is not None and exchange.started:
                await exchange.finish(exchange.format.failed(reply))
            elif not exchange.started:
                await send_error(scope, send, reply, self._api.error_body(reply))
        finally:
            exchange.close()

    async def _serve(self, exchange: _Exchange, place: Place, body: bytes) -> None:
        service, api = self._service, self._api
        fields = await service.in_thread(parse_body, body, api.model)
        del body
        request_id = api.id_prefix + exchange.choose_id(getattr(fields, "request_id", None))
        plan = await service.in_thread(api.plan, service, fields, request_id)
        del fields
        place.answers = len(plan.prompts) * plan.params.n
        for prompt in plan.prompts:
            # Clients may use an id twice, the engine's must differ.
            name = f"{request_id}-{new_id()[:8]}"
            place.requests.append(await service.llm.prepare(prompt, plan.params, name, **(plan.options or {})))
        service.check_queued_tokens(place)
        generation = Generation(service.llm, place.requests, plan.make_parser)
        form: Format = plan.make_format(generation)
        try:
            if plan.stream:
                await exchange.stream(generation, form)
            else:
                last: dict[int, Batch] = {}
                async with aclosing(generation.batches()) as batches:
                    async for batch in batches:
                        last[batch.prompt] = batch
                await exchange.whole(form.whole([last[prompt] for prompt in sorted(last)]))
        finally:
            service.records.extend(generation.records())


class _Exchange:
    """The answering half of one HTTP request."""

    def __init__(self, scope: Scope, send: Send, idle_seconds: float) -> None:
        self._scope, self._send, self._idle_seconds = scope, send, idle_seconds
        self.format: Format | None = None
        self.started = False
        self._loop = asyncio.get_running_loop()
        self._last_sent = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_task: asyncio.Task[None] | None = None

    def choose_id(self, wanted: str | None) -> str:
        """The request's id: the header's, else the body's, else a new one. It is also in the answer's header."""
        state = self._scope["state"]
        if not state["id_was_given"]:
            state["request_id"] = usable_id(wanted) or state["request_id"]
        found: str = state["request_id"]
        return found

    async def stream(self, generation: Generation, form: Format) -> None:
        """Send events as they come. Nothing is sent before the first: what fails until then has a status of its own."""
        self.format = form
        self._timer = self._loop.call_later(self._idle_seconds, self._check_idle)
        send, now = self._send, time.monotonic
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                data = form.batch(batch)
                if data:
                    if not self.started:
                        await self._start()
                    self._last_sent = now()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await self.finish(form.end())

    async def whole(self, body: bytes) -> None:
        """Send an answer in one piece."""
        self.started = True
        await send_body(self._scope, self._send, 200, body, [JSON])

    async def finish(self, data: bytes) -> None:
        """Send the last events."""
        self.close()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """Send nothing of its own any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _start(self) -> None:
        self.started = True
        await start(self._scope, self._send, 200, _STREAM_HEADERS)

    def _check_idle(self) -> None:
        left = self._last_sent + self._idle_seconds - time.monotonic()
        if left <= 0:
            self._last_sent, left = time.monotonic(), self._idle_seconds
            self._idle_task = self._loop.create_task(self._send_idle())
        self._timer = self._loop.call_later(left, self._check_idle)

    async def _send_idle(self) -> None:
        assert self.format is not None
        if not self.started:
            await self._start()
        if self._timer is not None:
            await self._send({"type": "http.response.body", "body": self.format.idle, "more_body": True})


@contextmanager
def _ended_from_outside(place: Place) -> Iterator[None]:
    """A cancellation by `Place.fail`, as the error that it was for."""
    try:
        yield
    except asyncio.CancelledError:
        if place.failure is None:
            raise
        _uncancel()
        raise place.failure from None


@asynccontextmanager
async def _until_the_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects. Raises ClientGoneError then."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def listen() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        _uncancel()
        raise ClientGoneError from None
    finally:
        listener.cancel()


def _uncancel() -> None:
    """The cancellation was ours, and is done with (Python 3.11 counts them)."""
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()
