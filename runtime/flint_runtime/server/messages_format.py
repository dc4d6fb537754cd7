"""How /v1/messages says what came: Anthropic's blocks and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from flint_runtime.chat.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.generation import Batch, Generation, Piece

_dump = orjson.dumps


class MessagesFormat:
    """An `endpoint.Format`."""

    idle = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, generation: Generation, *, message_id: str, model: str, shows_thinking: bool) -> None:
        self._generation = generation
        self._message: dict[str, Any] = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._begun = False
        self._open: str | None = None
        """The type of the block that is being sent."""
        self._index = -1
        """Of that block, or of the last one."""
        self._delta = b""
        """What stands before the text of its deltas."""
        self._last: Piece | None = None

    # --- Streamed -----------------------------------------------------------------------------------------------------

    def batch(self, batch: Batch) -> bytes:
        """See `endpoint.Format`."""
        said: list[bytes] = []
        if not self._begun:
            self._begun = True
            message = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None}
            said.append(_event("message_start", message={**message, "usage": self._usage()}))
        for piece in batch.pieces:
            for event in piece.events:
                self._say(event, said)
            self._last = piece
        return b"".join(said)

    def end(self) -> bytes:
        """See `endpoint.Format`."""
        said: list[bytes] = []
        self._close(said)
        said.append(_event("message_delta", delta=self._stop(self._last), usage=self._usage()))
        said.append(_event("message_stop"))
        return b"".join(said)

    def failed(self, error: ErrorReply) -> bytes:
        """See `endpoint.Format`."""
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def _say(self, event: Event, said: list[bytes]) -> None:
        if isinstance(event, ContentText):
            if self._open != "text":
                self._start({"type": "text", "text": ""}, b'{"type":"text_delta","text":', said)
            said.append(self._delta + _dump(event.text) + b"}}\n\n")
        elif isinstance(event, ReasoningText):
            if self._open != "thinking":
                thought = {"type": "thinking", "thinking": "", "signature": ""}
                self._start(thought, b'{"type":"thinking_delta","thinking":', said)
            if self._shows_thinking:
                said.append(self._delta + _dump(event.text) + b"}}\n\n")
        elif isinstance(event, CallArguments):
            said.append(self._delta + _dump(event.text) + b"}}\n\n")
        elif isinstance(event, CallStart):
            block: dict[str, Any] = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
            self._start(block, b'{"type":"input_json_delta","partial_json":', said)
        elif isinstance(event, CallEnd):
            self._close(said)

    def _start(self, block: dict[str, Any], delta: bytes, said: list[bytes]) -> None:
        """Begin a block, whose deltas begin with `delta`."""
        self._close(said)
        self._open, self._index = block["type"], self._index + 1
        self._delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b' % (
            self._index,
            delta,
        )
        said.append(_event("content_block_start", index=self._index, content_block=block))

    def _close(self, said: list[bytes]) -> None:
        """End the block that is open, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            said.append(_event("content_block_delta", index=self._index, delta=delta))
        said.append(_event("content_block_stop", index=self._index))
        self._open = None

    # --- Whole --------------------------------------------------------------------------------------------------------

    def whole(self, batches: list[Batch]) -> bytes:
        """See `endpoint.Format`."""
        (piece,) = batches[0].pieces
        return _dump(
            {
                **self._message,
                "content": self._content(piece.events),
                **self._stop(piece),
                "usage": self._usage(),
            }
        )

    def _content(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []

        def block(kind: str, **fields: Any) -> dict[str, Any]:
            if not blocks or blocks[-1]["type"] != kind or kind == "tool_use":
                blocks.append({"type": kind, **fields})
            return blocks[-1]

        for event in events:
            if isinstance(event, ContentText):
                block("text", text="")["text"] += event.text
            elif isinstance(event, ReasoningText):
                thought = block("thinking", thinking="", signature=self._signature)
                thought["thinking"] += event.text if self._shows_thinking else ""
            elif isinstance(event, CallStart):
                block("tool_use", id=event.call_id, name=event.name, input="")
            elif isinstance(event, CallArguments):
                blocks[-1]["input"] += event.text
            elif isinstance(event, CallEnd):
                blocks[-1]["input"] = orjson.Fragment(blocks[-1]["input"])  # as it stands: numbers have any size
        for found in blocks:
            if isinstance(found.get("input"), str):  # cut off: half a command must not look like a whole one
                found["input"] = {}
        return blocks

    # --- Both ---------------------------------------------------------------------------------------------------------

    @property
    def _signature(self) -> str:
        """Clients send it back and want it not to be empty; nothing here depends on it."""
        signature: str = self._message["id"]
        return signature

    def _stop(self, piece: Piece | None) -> dict[str, Any]:
        assert piece is not None
        (parser,) = self._generation.parsers
        stop = piece.output.stop_reason
        if self._generation.is_cut_off(piece):
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        called = parser is not None and parser.num_calls
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _dump({"type": kind, **fields}))
