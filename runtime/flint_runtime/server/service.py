"""Service: what all routes share. The engine, who is being served, and what is refused at once."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.errors import FlintError
from flint_runtime.llm_engine import PreparedRequest
from flint_runtime.server.errors import ApiError
from flint_runtime.server.settings import ServerSettings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_THREADS = 4
"""That read bodies and render prompts. Few: all of them want the interpreter, which the streams need, too."""
_MOST_RECORDS = 1000
_RATE_SECONDS = 10
"""Over which tokens per second are counted."""
_ID_CHARACTERS = 128


class Place:
    """One HTTP request that is being served, from before its body is read to the end of its answer."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.answers = 1
        """Generations that it asks for."""
        self.requests: list[PreparedRequest] = []
        """What the engine was given."""
        self.failure: FlintError | None = None
        """Why it was ended from outside."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of its requests of which no step was submitted yet."""
        return sum(len(r.choices[0].prompt) for r in self.requests if r.choices[0].scheduled is None)

    def fail(self, error: FlintError) -> None:
        """End it: its task is cancelled, and its client told of the error."""
        if self.failure is None:
            self.failure = error
            self._task.cancel()


class Service:
    """Serves one engine. For one event loop."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings
        self.created = int(time.time())
        self.draining = False
        """Whether nothing new is taken."""
        self.places: set[Place] = set()
        self.records: deque[dict[str, Any]] = deque(maxlen=_MOST_RECORDS)
        """Timings of the latest requests."""
        self._most_running: int = llm.snapshot()["slots"]
        self._pool = ThreadPoolExecutor(_THREADS, "flint-http")
        self._generated: deque[tuple[float, int]] = deque(maxlen=_RATE_SECONDS + 1)
        self._stuck = False

    async def run(self) -> None:
        """Watch the engine, as long as the server runs."""
        try:
            while True:
                self._watch()
                await asyncio.sleep(1)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Call a function that may take a while, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *arguments, **named))

    # --- Who is served ------------------------------------------------------------------------------------------------

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place for one request. Raises ApiError at once where none is to be had."""
        self.check_serving()
        most = self.settings.max_queue
        if most is not None and self.load >= self._most_running + most:
            raise ApiError(
                429,
                f"The queue is full: {self.load} answers run or wait, of which {self._most_running} run at once "
                f"(--max-num-seqs) and {most} may wait (--max-queue). Try again later.",
                code="queue_full",
                retry=True,
            )
        task = asyncio.current_task()
        assert task is not None
        found = Place(task)
        self.places.add(found)
        try:
            yield found
        finally:
            self.places.discard(found)

    def check_serving(self) -> None:
        """Raise ApiError where no request can be served now."""
        if self.draining:
            raise ApiError(503, "The server is shutting down and takes no new requests.", code="draining", retry=True)
        if not self.healthy:
            raise ApiError(503, self.trouble, code="engine_dead", retry=True)

    def check_queued_tokens(self, place: Place) -> None:
        """Raise ApiError where prompts of more tokens wait than may, of requests beside this one."""
        most = self.settings.max_queued_tokens
        if most is None:
            return
        waiting = sum(other.queued_tokens for other in self.places if other is not place)
        own = place.queued_tokens
        if waiting and waiting + own > most:
            raise ApiError(
                429,
                f"The queue is full: prompts of {waiting:,} tokens wait, this one has {own:,}, and {most:,} may wait "
                "in all (--max-queued-tokens). Try again later.",
                code="queue_full",
                retry=True,
            )

    @property
    def load(self) -> int:
        """Answers that run or wait."""
        return sum(place.answers for place in self.places)

    # --- How the engine is --------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether the engine serves requests."""
        return self.llm.is_running and not self.llm.errored and not self._hangs()

    @property
    def trouble(self) -> str:
        """What is wrong with an engine that is not healthy."""
        if self._hangs():
            return f"The engine hangs: its step has been running for {self.llm.step_seconds:.0f} s. Restart the server."
        return "The engine has died; the server's log says why. Restart the server."

    def _hangs(self) -> bool:
        return self.llm.step_seconds > self.settings.stuck_seconds

    def _watch(self) -> None:
        """End what an engine that hangs would never end; count tokens."""
        self._generated.append((time.monotonic(), self.llm.snapshot()["generation_tokens"]))
        hangs = self._hangs()
        if hangs and not self._stuck:
            logger.error("%s", self.trouble)
        if hangs:
            self.fail_all(ApiError(503, self.trouble, code="engine_dead", retry=True))
        self._stuck = hangs

    def fail_all(self, error: FlintError) -> None:
        """End every request with an error."""
        for place in list(self.places):
            place.fail(error)

    @property
    def tokens_per_second(self) -> float:
        """Generated lately."""
        if len(self._generated) < 2:
            return 0.0
        (begin, before), (end, after) = self._generated[0], self._generated[-1]
        return (after - before) / max(end - begin, 1e-3)

    # --- Names --------------------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raise ApiError where a request wants a model that is not served."""
        if name is not None and name not in self.settings.model_names:
            known = ", ".join(self.settings.model_names)
            raise ApiError(
                404,
                f"There is no model {name[:_ID_CHARACTERS]!r} here. This server has {known}.",
                code="model_not_found",
                param="model",
            )


def usable_id(given: str | None) -> str | None:
    """A request id that a client chose, if it can stand in a header and a log."""
    if given and len(given) <= _ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return None


def new_id() -> str:
    """An id that nobody else has."""
    return uuid.uuid4().hex
