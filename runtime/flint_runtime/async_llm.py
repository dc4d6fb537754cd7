"""AsyncLLM: the engine on a thread of its own, and requests from asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from flint_runtime.errors import EngineDeadError, FlintError, UsageError, shown
from flint_runtime.executors import ExecutorChoice
from flint_runtime.llm_engine import LLMEngine, PreparedRequest, Prompt, engine_opener
from flint_runtime.outputs import RequestOutput
from flint_runtime.request_check import check_id
from flint_runtime.request_stream import RequestStream
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from flint_runtime.tokenizer import Message, Tokenizer, Tool

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 30.0


class AsyncLLM:
    """Serves many requests at once. Its methods may be called from any number of event loops.

    `AsyncLLM(...)` opens an engine and waits for it. Use it as a context manager, or call `shutdown`.
    """

    def __init__(
        self, model: str | Path, executor: ExecutorChoice = "auto", *, seed: int | None = None, **core_config: Any
    ) -> None:
        """Open an engine; the arguments are those of `LLM`. Raises what it does."""
        self._run(engine_opener(model, executor, seed, core_config))

    @classmethod
    def from_factory(cls, make: Callable[[], LLMEngine]) -> AsyncLLM:
        """Run an engine that `make`, called on the engine's thread, returns."""
        llm = cls.__new__(cls)
        llm._run(make)
        return llm

    def _run(self, make: Callable[[], LLMEngine]) -> None:
        self._preparing: dict[str, bool] = {}
        """Requests that `generate` and `chat` are checking, and whether they were aborted meanwhile."""
        self._worker = _Worker()
        thread = threading.Thread(target=self._worker.run, args=(make,), name="flint-engine", daemon=True)
        thread.start()
        self._engine = self._worker.started.result()
        # Also when this object is forgotten, and before the interpreter ends under a running step.
        self._stop = weakref.finalize(self, _stop, self._worker, thread)

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come, in the form of sampling_params.output_kind.

        What came since the last one was taken is one output: a slow reader gets fewer, and misses nothing.

        Leaving the loop early, or cancelling the task, aborts the request. One that fails alone ends with
        finish_reason "error".

        Raises:
            UsageError: the request cannot be served.
            EngineDeadError: the engine has died or was shut down.
        """
        name = _name(request_id)
        async with aclosing(self._serve(name, self.prepare(prompt, sampling_params, name))) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a conversation; the arguments are those of `LLM.chat`."""
        name = _name(request_id)
        prepared = self.prepare_chat(
            messages,
            sampling_params,
            name,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        async with aclosing(self._serve(name, prepared)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> PreparedRequest:
        """Check a request without starting it; tokenises and compiles on another thread. Raises UsageError."""
        name = _name(request_id)
        return await asyncio.to_thread(self._engine.prepare, name, prompt, sampling_params)

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **chat: Any,
    ) -> PreparedRequest:
        """`prepare` for a conversation; the rest is as `LLMEngine.prepare_chat` takes it."""
        name = _name(request_id)
        return await asyncio.to_thread(self._engine.prepare_chat, name, messages, sampling_params, **chat)

    def stream(self, request: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Start a prepared request and give its outputs; see `generate`. A request can be started once."""
        return self._stream(request, aborted=False)

    async def _serve(self, name: str, prepared: Awaitable[PreparedRequest]) -> AsyncGenerator[RequestOutput, None]:
        """Prepare and start a request, which may be aborted from the beginning."""
        self._preparing[name] = aborted = False
        try:
            request = await prepared
        finally:
            aborted = self._preparing.pop(name, False)
        async with aclosing(self._stream(request, aborted)) as outputs:
            async for output in outputs:
                yield output

    async def _stream(self, request: PreparedRequest, aborted: bool) -> AsyncGenerator[RequestOutput, None]:
        delta = request.choices[0].params.output_kind is RequestOutputKind.DELTA
        stream = RequestStream(request.request_id, asyncio.get_running_loop(), delta=delta)
        self._worker.submit(_Add(request, stream, aborted))
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        except FlintError:
            finished = True
            raise
        finally:
            if not finished:
                self._worker.submit(_Abort(request.request_id, stream), even_if_dead=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, one or several, within a step: their last outputs have finish_reason "abort".

        Unknown ids, as of requests that just ended, are ignored.

        Raises:
            UsageError: an id is no text; then no request is ended.
        """
        names = [request_id] if isinstance(request_id, str) else _ids(request_id)
        for name in names:
            check_id(name)
        for name in names:
            if name in self._preparing:
                self._preparing[name] = True
            self._worker.submit(_Abort(name, None), even_if_dead=True)

    # --- State --------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._engine.max_model_len

    @property
    def errored(self) -> bool:
        """Whether the engine has died; not by `shutdown`."""
        end = self._worker.end
        return end is not None and end.errored

    @property
    def is_running(self) -> bool:
        """Whether requests are served: not behind the end, and not in a forked child."""
        return self._worker.end is None and self._worker.is_here()

    @property
    def step_seconds(self) -> float:
        """How long the step at hand has been running, 0 between steps. A step that does not end is a stuck engine."""
        since = self._worker.step_started
        return 0.0 if since is None else time.monotonic() - since

    def snapshot(self) -> dict[str, Any]:
        """Every metric as plain values; see `Metrics.snapshot`."""
        return self._engine.snapshot()

    def shutdown(self) -> None:
        """Stop the engine; requests that are running end with EngineDeadError. Waits for the step at hand."""
        self._stop()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@dataclass(frozen=True)
class _Add:
    request: PreparedRequest
    stream: RequestStream
    aborted: bool
    """Whether it is to be aborted at once."""


@dataclass(frozen=True)
class _Abort:
    request_id: str
    stream: RequestStream | None
    """Abort only the request of this stream, to which nobody listens any more."""


class _Stop:
    """Serve nothing any more."""


@dataclass(frozen=True)
class _End:
    """Why nothing is served any more."""

    message: str
    errored: bool
    cause: BaseException | None = None

    def error(self) -> EngineDeadError:
        """A new one for everyone: an exception that is raised twice gathers tracebacks."""
        error = EngineDeadError(self.message)
        error.__cause__ = self.cause
        return error


_Command = _Add | _Abort | _Stop
_Item = tuple[RequestStream, RequestOutput | FlintError]


class _Worker:
    """The engine's thread: takes commands, steps the engine, sends outputs. Sleeps while there is nothing to do."""

    def __init__(self) -> None:
        self.started: Future[LLMEngine] = Future()
        self.step_started: float | None = None
        self.end: _End | None = None
        """Set once."""
        self._process = os.getpid()
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        # Guards end and streams: no command comes behind the end, so that no request waits for ever.
        self._lock = threading.Lock()

    def is_here(self) -> bool:
        """Whether this is the process that the thread runs in: no thread comes with a fork."""
        return os.getpid() == self._process

    def submit(self, command: _Command, even_if_dead: bool = False) -> None:
        """Hand a command over; from any thread. Raises EngineDeadError."""
        if not self.is_here():  # Before the lock, which somebody may have held when the process was forked.
            if even_if_dead:
                return
            raise EngineDeadError(
                f"This engine runs in process {self._process}, from which process {os.getpid()} was forked. Open the "
                'engine in the process that uses it; for multiprocessing, use the start method "spawn".'
            )
        with self._lock:
            if self.end is None:
                self._commands.put(command)
            elif not even_if_dead:
                raise self.end.error()

    def run(self, make: Callable[[], LLMEngine]) -> None:
        """The thread's body: open the engine, serve until stopped or dead."""
        try:
            engine = make()
        except BaseException as error:
            self.started.set_exception(error)
            return
        self.started.set_result(engine)
        try:
            while self._take_commands(engine):
                self.step_started = time.monotonic()
                outputs = engine.step()
                self.step_started = None
                self._report(engine, outputs)
            self.finish(_End("The engine was shut down.", errored=False))
            engine.close()
        except BaseException as error:
            logger.exception("The engine died.")
            what = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}."
            self.finish(_End(f"The engine died: {what} Its log says more.", errored=True, cause=error))
        finally:
            self.step_started = None

    def _take_commands(self, engine: LLMEngine) -> bool:
        """Carry out what was asked, waiting for something to do; false: stop."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_work())
            except Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Add):
                self._add(engine, command)
            else:
                self._abort(engine, command)

    def _add(self, engine: LLMEngine, command: _Add) -> None:
        """Start a request. Whatever goes wrong, its reader hears of it."""
        request_id, stream = command.request.request_id, command.stream
        try:
            engine.add_request(command.request)
        except BaseException as error:
            self._send([(stream, _flint_error(error))])
            if not isinstance(error, Exception):
                raise
            return
        with self._lock:
            self._streams[request_id] = stream
        if command.aborted:
            self._abort(engine, _Abort(request_id, stream))

    def _abort(self, engine: LLMEngine, command: _Abort) -> None:
        stream = self._streams.get(command.request_id)
        if stream is None or command.stream not in (None, stream):
            return
        try:
            output = engine.abort_request(command.request_id)
            last = _flint_error(LookupError("the engine does not know it")) if output is None else output
        except Exception as error:
            logger.exception("Request %r could not be aborted.", command.request_id)
            last = _flint_error(error)
        self._forget(stream)
        self._send([(stream, last)])

    def _report(self, engine: LLMEngine, outputs: list[RequestOutput]) -> None:
        """Send outputs to their streams, and forget the finished; abort requests whose event loop is gone."""
        with self._lock:
            items: list[_Item] = [
                (self._streams[output.request_id], output) for output in outputs if output.request_id in self._streams
            ]
            for output in outputs:
                if output.finished:
                    self._streams.pop(output.request_id, None)
        for stream in self._send(items):
            self._abort(engine, _Abort(stream.request_id, stream))

    def _forget(self, stream: RequestStream) -> None:
        with self._lock:
            self._streams.pop(stream.request_id, None)

    def _send(self, items: list[_Item]) -> list[RequestStream]:
        """Put items into their streams, one call per event loop; the streams whose loop is closed."""
        asleep: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        lost = []
        for stream, item in items:
            if stream.loop.is_closed():
                lost.append(stream)
            elif stream.put(item):
                asleep.setdefault(stream.loop, []).append(stream)
        for loop, streams in asleep.items():
            try:
                loop.call_soon_threadsafe(_wake, streams)
            except RuntimeError:
                lost += streams
        return lost

    def finish(self, end: _End) -> None:
        """Serve nothing any more: every request, waiting or running, ends with an error."""
        with self._lock:
            if self.end is not None:
                return
            self.end = end
            streams = list(self._streams.values())
            self._streams.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                streams.append(command.stream)
        self._send([(stream, end.error()) for stream in streams])


def _wake(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.wake()


def _flint_error(error: BaseException) -> FlintError:
    """What a request's reader is told of an exception."""
    if isinstance(error, FlintError):
        return error
    found = FlintError(f"The request failed in the engine, a bug of ours: {type(error).__name__}: {error}.")
    found.__cause__ = error
    return found


def _name(request_id: str | None) -> str:
    """The request's id, or one that nobody else has. Raises UsageError."""
    if request_id is None:
        return uuid.uuid4().hex
    check_id(request_id)
    return request_id


def _ids(request_ids: Iterable[str]) -> list[str]:
    try:
        return list(request_ids)
    except TypeError:
        raise UsageError(f"abort takes a request id or several, found {shown(request_ids)}.") from None


def _stop(worker: _Worker, thread: threading.Thread) -> None:
    if not worker.is_here():
        return
    worker.submit(_Stop(), even_if_dead=True)
    if thread is threading.current_thread():  # the garbage collector may run on any
        return
    thread.join(_SHUTDOWN_S)
    if thread.is_alive():
        worker.finish(_End(f"The engine's step did not end within {_SHUTDOWN_S:.0f} s.", errored=True))
