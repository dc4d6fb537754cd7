"""RequestStream: one request's outputs on their way from the engine's thread to the event loop that asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

from flint_runtime.errors import FlintError
from flint_runtime.outputs import CompletionOutput, RequestOutput

_MOST_UNMERGED = 64
"""Deltas that may wait one by one. Merging them in batches costs the engine's thread less than one after the other."""


class RequestStream:
    """Holds what its reader has not taken yet, as one output: a reader that stopped costs no more than its text.

    `put` is for the engine's thread, the rest for the event loop.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, *, delta: bool) -> None:
        """
        Args:
            delta: outputs say what is new; otherwise each replaces the one before.
        """
        self.request_id, self.loop = request_id, loop
        self._delta = delta
        self._outputs: list[RequestOutput] = []
        self._error: FlintError | None = None
        self._lock = threading.Lock()
        self._ready = asyncio.Event()

    def put(self, item: RequestOutput | FlintError) -> bool:
        """Add an output, or what ended the request. True: the event loop must call `wake`."""
        with self._lock:
            asleep = not self._outputs and self._error is None
            if isinstance(item, FlintError):
                self._error = item
            elif not self._delta:
                self._outputs = [item]
            else:
                self._outputs.append(item)
                if len(self._outputs) > _MOST_UNMERGED:
                    self._outputs = [merge_deltas(self._outputs)]
            return asleep

    def wake(self) -> None:
        """There is something to take."""
        self._ready.set()

    async def get(self) -> RequestOutput:
        """What came since the last call, at least one output. Raises what ended the request, behind its outputs."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                outputs, self._outputs = self._outputs, []
                error = self._error
            if outputs:
                if error is not None:
                    self._ready.set()
                return merge_deltas(outputs)
            if error is not None:
                raise error


def merge_deltas(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that says what these say one after the other."""
    if len(outputs) == 1:
        return outputs[0]
    by_index: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for choice in output.outputs:
            by_index.setdefault(choice.index, []).append(choice)
    return replace(
        outputs[-1],
        outputs=[_merge_choice(by_index[index]) for index in sorted(by_index)],
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
    )


def _merge_choice(deltas: Sequence[CompletionOutput]) -> CompletionOutput:
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        marks=[mark for delta in deltas for mark in delta.marks],
        logprobs=None if last.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()],
    )
