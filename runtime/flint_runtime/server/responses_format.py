"""How /v1/responses says what came: OpenAI's items and events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson

from flint_runtime.chat.events import CallEnd, CallStart, ContentText, Event, ReasoningText
from flint_runtime.llm_engine import PreparedRequest
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.generation import Batch, Generation
from flint_runtime.server.response_store import StoredResponse
from flint_runtime.server.responses_input import sealed
from flint_runtime.server.service import new_id

_dump = orjson.dumps


class _Item:
    """One item of the output, on its way."""

    def __init__(self, kind: str, index: int, fields: dict[str, Any]) -> None:
        self.kind, self.index, self._fields = kind, index, fields
        prefix, self.event = _KINDS[kind]
        self.id = prefix + new_id()
        self.texts: list[str] = []

    @property
    def is_call(self) -> bool:
        """Whether it is a call: others have their text in a part."""
        return self.kind == "function_call"

    @property
    def place(self) -> dict[str, Any]:
        """What events about it say of where it is."""
        found: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return found if self.is_call else {**found, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """The part with its text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shown(self, status: str, *, begun: bool = True, seals: bool = False) -> dict[str, Any]:
        """The item as clients get it; without its text where it has not `begun`."""
        text = "".join(self.texts)
        found = {"id": self.id, "type": self.kind, "status": status, **self._fields}
        if self.is_call:
            return {**found, "arguments": text}
        found["content"] = [self.part(text)] if begun else []
        if seals and self.kind == "reasoning":
            found["encrypted_content"] = sealed(text)
        return found


_KINDS = {
    "reasoning": ("rs_", "response.reasoning_text"),
    "message": ("msg_", "response.output_text"),
    "function_call": ("fc_", "response.function_call_arguments"),
}
"""Prefix of its ids, and of the events of its text, for every kind of items."""


class ResponsesFormat:
    """An `endpoint.Format`."""

    idle = b": waiting\n\n"

    def __init__(
        self,
        generation: Generation,
        *,
        head: dict[str, Any],
        items: bytes,
        seals: bool,
        store: Callable[[str, StoredResponse], None] | None,
        running: Callable[[ResponsesFormat], None],
    ) -> None:
        """
        Args:
            head: the fields of the response that stay.
            items: JSON list of the conversation's items before the answer.
            seals: reasoning comes with `encrypted_content`.
            store: keeps the response when it has ended.
            running: told of this object, which can be asked and cancelled from now on.
        """
        self._generation, self._head, self._items, self._seals, self._store = generation, head, items, seals, store
        self._sequence = 0
        self._begun = False
        self._last_status = "completed"
        self._open: _Item | None = None
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._ended: bytes | None = None
        """The last state of the response."""
        running(self)

    @property
    def response_id(self) -> str:
        """The response's id."""
        found: str = self._head["id"]
        return found

    @property
    def requests(self) -> list[PreparedRequest]:
        """What the engine was asked."""
        return self._generation.requests

    @property
    def is_stored(self) -> bool:
        """Whether it will be kept."""
        return self._store is not None

    # --- Streamed -----------------------------------------------------------------------------------------------------

    def batch(self, batch: Batch) -> bytes:
        """See `endpoint.Format`."""
        said: list[bytes] = []
        self._begin(said)
        self._read(batch, said)
        return b"".join(said)

    def end(self) -> bytes:
        """See `endpoint.Format`."""
        said: list[bytes] = []
        status = self._last_status
        self._close(status, said)
        self._say(f"response.{status}", said, response=orjson.Fragment(self._finish(status)))
        return b"".join(said)

    def failed(self, error: ErrorReply) -> bytes:
        """See `endpoint.Format`."""
        said: list[bytes] = []
        self._begin(said)
        self._close("incomplete", said)
        ended = self._ended
        if ended is None:
            ended = self._finish("failed", error={"code": "server_error", "message": error.message})
        self._say("response.failed", said, response=orjson.Fragment(ended))
        return b"".join(said)

    def _begin(self, said: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            response = orjson.Fragment(_dump(self._response("in_progress")))
            self._say("response.created", said, response=response)
            self._say("response.in_progress", said, response=response)

    def _read(self, batch: Batch, said: list[bytes]) -> None:
        for piece in batch.pieces:
            for event in piece.events:
                self._add(event, said)
            if piece.output.finish_reason == "length":
                self._last_status = "incomplete"

    def _add(self, event: Event, said: list[bytes]) -> None:
        if isinstance(event, CallEnd):
            self._close("completed", said)
        elif isinstance(event, CallStart):
            self._start("function_call", said, call_id=event.call_id, name=event.name)
        else:
            if isinstance(event, ContentText):
                self._ensure("message", said, role="assistant")
            elif isinstance(event, ReasoningText):
                self._ensure("reasoning", said, summary=[])
            item = self._open
            assert item is not None
            item.texts.append(event.text)
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            self._say(item.event + ".delta", said, **item.place, delta=event.text, **more)

    def _ensure(self, kind: str, said: list[bytes], **fields: Any) -> None:
        """Start an item unless one of its kind is open."""
        if self._open is None or self._open.kind != kind:
            self._start(kind, said, **fields)

    def _start(self, kind: str, said: list[bytes], **fields: Any) -> None:
        self._close("completed", said)
        item = self._open = _Item(kind, len(self._output), fields)
        shown = item.shown("in_progress", begun=False)
        self._say("response.output_item.added", said, output_index=item.index, item=shown)
        if not item.is_call:
            self._say("response.content_part.added", said, **item.place, part=item.part(""))

    def _close(self, status: str, said: list[bytes]) -> None:
        """End the item that is open, if there is one."""
        item = self._open
        if item is None:
            return
        self._open = None
        text = "".join(item.texts)
        if item.is_call:
            self._say(item.event + ".done", said, **item.place, arguments=text)
        else:
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            self._say(item.event + ".done", said, **item.place, text=text, **more)
            self._say("response.content_part.done", said, **item.place, part=item.part(text))
        shown = item.shown(status, seals=self._seals)
        self._output.append(shown)
        self._say("response.output_item.done", said, output_index=item.index, item=shown)

    def _say(self, kind: str, said: list[bytes], **fields: Any) -> None:
        data = _dump({"type": kind, "sequence_number": self._sequence, **fields})
        said.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._sequence += 1

    # --- Whole --------------------------------------------------------------------------------------------------------

    def whole(self, batches: list[Batch]) -> bytes:
        """See `endpoint.Format`."""
        unsaid: list[bytes] = []
        self._read(batches[0], unsaid)
        status = self._last_status
        self._close(status, unsaid)
        return self._finish(status)

    # --- The response -------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended is not None

    def now(self) -> bytes:
        """The response as it is, in JSON."""
        return self._ended or _dump(self._response("in_progress"))

    def cancel(self) -> bytes:
        """End it as cancelled, without the engine's request: the response, in JSON."""
        return self._finish("cancelled")

    def _finish(self, status: str, **more: Any) -> bytes:
        """Its last state, which is kept, as JSON."""
        response = self._response(status, **more)
        self._ended = _dump(response)
        if self._store is not None:
            items = b",".join(part for part in (self._items[1:-1], _dump(response["output"])[1:-1]) if part)
            self._store(self.response_id, StoredResponse(self._ended, b"[" + items + b"]"))
        return self._ended

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        ended = status != "in_progress"
        begun = [] if self._open is None else [self._open.shown("incomplete" if ended else "in_progress")]
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "output": [*self._output, *begun],
            "usage": self._usage() if ended else None,
            **more,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
