"""How /v1/chat/completions says what came.

A chunk is put together from ready pieces of JSON: models and dicts took most of the time that a token costs here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from flint_runtime.chat.events import CallArguments, CallStart, ContentText, Event, ReasoningText
from flint_runtime.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.generation import Batch, Generation, Piece, Usage
from flint_runtime.server.protocol.chat import ChatRequest

_dump = orjson.dumps
_DONE = b"data: [DONE]\n\n"
_NOT_FINISHED = b'},"logprobs":null,"finish_reason":null}'


class ChatFormat:
    """An `endpoint.Format`."""

    idle = b": waiting\n\n"

    def __init__(
        self,
        generation: Generation,
        *,
        request_id: str,
        created: int,
        model: str,
        body: ChatRequest,
        named_call: bool,
    ) -> None:
        self._generation, self._body = generation, body
        self._named_call = named_call
        self._reasoning = body.include_reasoning is not False
        self._top = body.top_logprobs or 0
        self._continuous_usage = body.continuous_usage
        self._wants_extras = bool(body.logprobs) or bool(body.return_token_ids)
        self._common: dict[str, Any] = {"id": request_id, "created": created, "model": model}
        head = b"data: " + _dump({**self._common, "object": "chat.completion.chunk"})[:-1]
        self._head = head + b',"choices":[{"index":'
        self._no_choices = head + b',"choices":[],"usage":'
        answers = range(len(generation.parsers))
        self._deltas = [self._head + b'%d,"delta":{' % index for index in answers]
        self._begun = [False] * len(generation.parsers)
        self._extras: list[_Extras] = [_Extras() for _ in answers]

    # --- Streamed -----------------------------------------------------------------------------------------------------

    def batch(self, batch: Batch) -> bytes:
        """See `endpoint.Format`."""
        tail = b"]" + self._usage() + b"}\n\n" if self._continuous_usage else b"]}\n\n"
        chunks: list[bytes] = []
        for piece in batch.pieces:
            index = piece.answer
            start = self._deltas[index]
            if not self._begun[index]:
                self._begun[index] = True
                chunks.append(self._role(start, batch.output))
            if self._wants_extras:
                self._extras[index].add(piece.output, self._body, self._top)
            for event in piece.events:
                delta = self._delta(event)
                if delta is not None:
                    chunks.append(start + delta + self._middle(index) + tail)
            if piece.output.finish_reason is not None:
                chunks.append(self._finish(start, piece) + tail)
        return b"".join(chunks)

    def end(self) -> bytes:
        """See `endpoint.Format`."""
        if not self._body.includes_usage:
            return _DONE
        return self._no_choices + _dump(usage_fields(self._generation.usage)) + b"}\n\n" + _DONE

    def failed(self, error: ErrorReply) -> bytes:
        """See `endpoint.Format`."""
        return b"data: " + error.body() + b"\n\n" + _DONE

    def _role(self, start: bytes, output: RequestOutput) -> bytes:
        more = b""
        if self._body.return_token_ids:
            more = b',"prompt_token_ids":' + _dump(output.prompt_token_ids)
        usage = self._usage() if self._continuous_usage else b""
        return start + b'"role":"assistant","content":""' + _NOT_FINISHED + b"]" + more + usage + b"}\n\n"

    def _delta(self, event: Event) -> bytes | None:
        """The JSON of a delta without its braces; None: there is nothing to say."""
        if isinstance(event, ContentText):
            return b'"content":' + _dump(event.text)
        if isinstance(event, ReasoningText):
            if not self._reasoning:
                return None
            text = _dump(event.text)
            return b'"reasoning":' + text + b',"reasoning_content":' + text
        if isinstance(event, CallArguments):
            return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (event.index, _dump(event.text))
        if isinstance(event, CallStart):
            return b'"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]' % (
                event.index,
                _dump(event.call_id),
                _dump(event.name),
            )
        return None

    def _middle(self, index: int) -> bytes:
        """What stands behind the delta of a chunk that is not the last."""
        if not self._wants_extras:
            return _NOT_FINISHED
        logprobs, token_ids = self._extras[index].take(self._body)
        return b'},"logprobs":' + logprobs + b',"finish_reason":null' + token_ids + b"}"

    def _finish(self, start: bytes, piece: Piece) -> bytes:
        logprobs, token_ids = self._extras[piece.answer].take(self._body) if self._wants_extras else (b"null", b"")
        return b"".join(
            (
                start,
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":',
                _dump(self._finish_reason(piece)),
                b',"stop_reason":',
                _dump(piece.output.stop_reason),
                token_ids,
                b"}",
            )
        )

    def _usage(self) -> bytes:
        return b',"usage":' + _dump(usage_fields(self._generation.usage))

    # --- Whole --------------------------------------------------------------------------------------------------------

    def whole(self, batches: list[Batch]) -> bytes:
        """See `endpoint.Format`."""
        body: dict[str, Any] = {
            **self._common,
            "object": "chat.completion",
            "choices": [self._choice(piece) for batch in batches for piece in batch.pieces],
            "usage": usage_fields(self._generation.usage),
        }
        output = batches[0].output
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_fields(output.prompt_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return _dump(body)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        output = piece.output
        logprobs = None
        if self._body.logprobs:
            logprobs = {"content": [token_fields(entry, token, self._top) for entry, token in _entries(output)]}
        found = {
            "index": piece.answer,
            "message": message_fields(piece.events, self._reasoning),
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(piece),
            "stop_reason": output.stop_reason,
        }
        if self._body.return_token_ids:
            found["token_ids"] = output.token_ids
        return found

    def _finish_reason(self, piece: Piece) -> str | None:
        reason, parser = piece.output.finish_reason, self._generation.parsers[piece.answer]
        if reason != "stop" or parser is None or not parser.num_calls:
            return reason
        if self._generation.is_cut_off(piece):  # by a stop text, say: it must not look complete
            return "length"
        return "stop" if self._named_call else "tool_calls"


class _Extras:
    """Logprobs and token ids of one answer on their way: they go with the next chunk, whatever it says."""

    __slots__ = ("_logprobs", "_token_ids")

    def __init__(self) -> None:
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []

    def add(self, output: CompletionOutput, body: ChatRequest, top: int) -> None:
        if body.logprobs:
            self._logprobs += [token_fields(entry, token, top) for entry, token in _entries(output)]
        if body.return_token_ids:
            self._token_ids += output.token_ids

    def take(self, body: ChatRequest) -> tuple[bytes, bytes]:
        """The value of "logprobs", and the field "token_ids" with a comma before it."""
        logprobs, self._logprobs = self._logprobs, []
        token_ids, self._token_ids = self._token_ids, []
        return (
            _dump({"content": logprobs}) if logprobs else b"null",
            b',"token_ids":' + _dump(token_ids) if body.return_token_ids else b"",
        )


def message_fields(events: Iterable[Event], include_reasoning: bool = True) -> dict[str, Any]:
    """The message that a whole answer's events are."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ContentText):
            content.append(event.text)
        elif isinstance(event, ReasoningText):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            calls.append({"id": event.call_id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content) or (None if calls else "")}
    if reasoning and include_reasoning:
        message["reasoning"] = message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The usage of OpenAI's API."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def token_fields(entry: Logprobs, token_id: int, top: int) -> dict[str, Any]:
    """A token's logprob, and the `top` likeliest beside it."""
    best = sorted(entry.values(), key=lambda one: -one.logprob)[:top]
    return {**_logprob_fields(entry[token_id]), "top_logprobs": [_logprob_fields(one) for one in best]}


def _logprob_fields(one: Logprob) -> dict[str, Any]:
    # OpenAI's API has no minus infinity either: it says -9999.
    return {"token": one.decoded_token or "", "logprob": max(one.logprob, -9999.0), "bytes": list(one.token_bytes)}


def prompt_logprobs_fields(given: Sequence[Logprobs | None] | None) -> list[Any] | None:
    """Logprobs of a prompt, as vLLM has them: by token id."""
    if given is None:
        return None
    return [
        entry
        and {
            str(token): {
                "logprob": max(one.logprob, -9999.0),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in entry.items()
        }
        for entry in given
    ]


def _entries(output: CompletionOutput) -> Iterable[tuple[Logprobs, int]]:
    return zip(output.logprobs or (), output.token_ids, strict=False)
