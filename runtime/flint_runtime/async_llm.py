"""AsyncLLM: the engine on a thread of its own, and requests from asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from flint_runtime.errors import EngineDeadError, FlintError
from flint_runtime.executors import ExecutorChoice
from flint_runtime.llm_engine import LLMEngine, PreparedRequest, Prompt, engine_opener
from flint_runtime.outputs import RequestOutput
from flint_runtime.sampling_params import SamplingParams
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

        Leaving the loop early, or cancelling the task, aborts the request. One that fails alone ends with
        finish_reason "error".

        Raises:
            UsageError: the request cannot be served.
            EngineDeadError: the engine has died or was shut down.
        """
        async with aclosing(self.stream(await self.prepare(prompt, sampling_params, request_id))) as outputs:
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
        request = await self.prepare_chat(
            messages,
            sampling_params,
            request_id,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        async with aclosing(self.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> PreparedRequest:
        """Check a request without starting it; tokenises and compiles on another thread. Raises UsageError."""
        name = request_id or uuid.uuid4().hex
        return await asyncio.to_thread(self._engine.prepare, name, prompt, sampling_params)

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **chat: Any,
    ) -> PreparedRequest:
        """`prepare` for a conversation; the rest is as `LLMEngine.prepare_chat` takes it."""
        name = request_id or uuid.uuid4().hex
        return await asyncio.to_thread(self._engine.prepare_chat, name, messages, sampling_params, **chat)

    async def stream(self, request: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Start a prepared request and give its outputs; see `generate`."""
        stream = _Stream(request.request_id, asyncio.get_running_loop())
        self._worker.submit(_Add(request, stream))
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

    async def abort(self, request_id: str) -> None:
        """End a request within a step: its last output has finish_reason "abort". Unknown ids are none."""
        self._worker.submit(_Abort(request_id, None), even_if_dead=True)

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
        """Whether requests are served."""
        return self._worker.end is None

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


class _Stream:
    """Outputs of one request on their way to the event loop that asked."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id, self.loop = request_id, loop
        self.queue: asyncio.Queue[RequestOutput | FlintError] = asyncio.Queue()

    async def get(self) -> RequestOutput:
        """The next output. Raises what ended the request."""
        item = await self.queue.get()
        if isinstance(item, FlintError):
            raise item
        return item


@dataclass(frozen=True)
class _Add:
    request: PreparedRequest
    stream: _Stream


@dataclass(frozen=True)
class _Abort:
    request_id: str
    stream: _Stream | None
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
_Item = tuple[_Stream, RequestOutput | FlintError]


class _Worker:
    """The engine's thread: takes commands, steps the engine, sends outputs. Sleeps while there is nothing to do."""

    def __init__(self) -> None:
        self.started: Future[LLMEngine] = Future()
        self.step_started: float | None = None
        self.end: _End | None = None
        """Set once."""
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        # Guards end and streams: no command comes behind the end, so that no request waits for ever.
        self._lock = threading.Lock()

    def submit(self, command: _Command, even_if_dead: bool = False) -> None:
        """Hand a command over; from any thread. Raises EngineDeadError."""
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
            message = f"The engine died: {type(error).__name__}: {error}. Restart it; its log says more."
            self.finish(_End(message, errored=True, cause=error))

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
        try:
            engine.add_request(command.request)
        except FlintError as error:
            self._send([(command.stream, error)])
            return
        with self._lock:
            self._streams[command.request.request_id] = command.stream

    def _abort(self, engine: LLMEngine, command: _Abort) -> None:
        stream = self._streams.get(command.request_id)
        if stream is not None and command.stream in (None, stream):
            output = engine.abort_request(command.request_id)
            self._report(engine, [output] if output else [])

    def _report(self, engine: LLMEngine, outputs: list[RequestOutput]) -> None:
        """Send outputs to their streams, and forget the finished; abort requests whose event loop is gone."""
        with self._lock:
            items: list[_Item] = [(self._streams[output.request_id], output) for output in outputs]
            for output in outputs:
                if output.finished:
                    del self._streams[output.request_id]
        for stream in self._send(items):
            with self._lock:
                self._streams.pop(stream.request_id, None)
            engine.abort_request(stream.request_id)

    def _send(self, items: list[_Item]) -> list[_Stream]:
        """Put items into their streams' queues, one call per event loop; the streams whose loop is closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Item]] = {}
        for item in items:
            by_loop.setdefault(item[0].loop, []).append(item)
        lost = []
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, own)
            except RuntimeError:
                lost += [stream for stream, _ in own]
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


def _put(items: list[_Item]) -> None:
    for stream, item in items:
        stream.queue.put_nowait(item)


def _stop(worker: _Worker, thread: threading.Thread) -> None:
    worker.submit(_Stop(), even_if_dead=True)
    if thread is threading.current_thread():  # the garbage collector may run on any
        return
    thread.join(_SHUTDOWN_S)
    if thread.is_alive():
        worker.finish(_End(f"The engine's step did not end within {_SHUTDOWN_S:.0f} s.", errored=True))
