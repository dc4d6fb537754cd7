"""One request on its way through the engine, as every API reads it: outputs, and what the parser makes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.chat.events import Event
from flint_runtime.chat.parser import GlmParser
from flint_runtime.llm_engine import PreparedRequest
from flint_runtime.outputs import CompletionOutput, RequestOutput
from flint_runtime.server.errors import AnswerError

MakeParser = Callable[[bool], GlmParser]
"""Makes a parser for one answer; told whether the prompt leaves the thinking part open."""


class Piece(NamedTuple):
    """What is new of one answer."""

    answer: int
    """Its number among all answers of the HTTP request."""
    events: Sequence[Event]
    """What the parser made of it; empty without a parser."""
    output: CompletionOutput


class Batch(NamedTuple):
    """What came at once for one prompt."""

    prompt: int
    """Its number among the prompts of the HTTP request."""
    output: RequestOutput
    pieces: list[Piece]


@dataclass(slots=True)
class Usage:
    """Tokens so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Generation:
    """Prompts, each with n answers, numbered through. Its `batches` can be read once."""

    def __init__(self, llm: AsyncLLM, requests: list[PreparedRequest], make_parser: MakeParser | None = None) -> None:
        self._llm, self.requests = llm, requests
        self.n = len(requests[0].choices)
        self.parsers = [
            make_parser(llm.tokenizer.opens_thinking(choice.prompt)) if make_parser else None
            for request in requests
            for choice in request.choices
        ]
        """By number of the answer."""
        self.usage = Usage(prompt_tokens=sum(len(request.choices[0].prompt) for request in requests))
        self._error: str | None = None
        """What ended an answer, and with it all of them."""
        self._cached = [0] * len(requests)
        self._last: list[RequestOutput | None] = [None] * len(requests)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """What comes, in the form of the requests' output_kind. Leaving the loop ends the requests.

        Raises:
            AnswerError: the engine ended an answer with an error.
            FlintError: what `AsyncLLM.generate` raises.
        """
        if len(self.requests) > 1:
            async with aclosing(self._merged()) as outputs:
                async for prompt, output in outputs:
                    yield self._read(prompt, output)
                    self._check_error()
            return
        async with aclosing(self._llm.stream(self.requests[0])) as stream:
            async for output in stream:
                yield self._read(0, output)
                self._check_error()

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of several requests as they come."""
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

        async def forward(prompt: int, request: PreparedRequest) -> None:
            try:
                async with aclosing(self._llm.stream(request)) as outputs:
                    async for output in outputs:
                        await queue.put((prompt, output))
            except Exception as error:
                await queue.put((prompt, error))
            else:
                await queue.put((prompt, None))

        tasks = [asyncio.create_task(forward(i, request)) for i, request in enumerate(self.requests)]
        try:
            left = len(tasks)
            while left:
                prompt, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield prompt, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_error(self) -> None:
        if self._error is not None:
            raise AnswerError(self._error)

    def _read(self, prompt: int, output: RequestOutput) -> Batch:
        usage, first = self.usage, prompt * self.n
        if output.num_cached_tokens > self._cached[prompt]:
            usage.cached_tokens += output.num_cached_tokens - self._cached[prompt]
            self._cached[prompt] = output.num_cached_tokens
        pieces = []
        for choice in output.outputs:
            if choice.finish_reason == "error":  # Raised behind what came before it.
                self._error = choice.error or "The engine ended this request with an error."
                choice = replace(choice, finish_reason=None)
            usage.completion_tokens += len(choice.token_ids)
            index = first + choice.index
            parser = self.parsers[index]
            events: Sequence[Event] = ()
            if parser is not None:
                before = parser.reasoning_tokens
                events = parser.feed(choice.text, choice.token_ids, choice.marks)
                if choice.finish_reason is not None:
                    events = [*events, *parser.finish(choice.finish_reason, choice.stop_reason)]
                usage.reasoning_tokens += parser.reasoning_tokens - before
            pieces.append(Piece(index, events, choice))
        self._last[prompt] = output
        return Batch(prompt, output, pieces)

    def records(self) -> list[dict[str, Any]]:
        """Timings of the requests, in seconds; None: it did not come so far."""
        now = time.monotonic()
        return [self._record(request, last, now) for request, last in zip(self.requests, self._last, strict=True)]

    def _record(self, request: PreparedRequest, last: RequestOutput | None, now: float) -> dict[str, Any]:
        core, times = request.choices[0], last.metrics if last else None
        first = times.first_token_time if times else None
        return {
            "request_id": request.request_id,
            "prompt_tokens": len(core.prompt),
            "cached_tokens": last.num_cached_tokens if last else 0,
            "finished": bool(last and last.finished),
            "arrival_time": time.time() - (now - core.arrival),
            "queue_time": core.scheduled - core.arrival if core.scheduled is not None else None,
            "time_to_first_token": first - core.arrival if first is not None else None,
            "last_token_time": times.last_token_time - core.arrival if times and times.last_token_time else None,
            "duration": now - core.arrival,
        }
