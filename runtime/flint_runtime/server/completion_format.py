"""How /v1/completions says what came."""

from __future__ import annotations

from typing import Any

import orjson

from flint_runtime.outputs import Logprobs, RequestOutput
from flint_runtime.server.chat_format import prompt_logprobs_fields, usage_fields
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.generation import Batch, Generation, Piece
from flint_runtime.server.protocol.completion import CompletionRequest
from flint_runtime.tokenizer import Tokenizer

_dump = orjson.dumps
_DONE = b"data: [DONE]\n\n"


class CompletionFormat:
    """An `endpoint.Format`."""

    idle = b": waiting\n\n"

    def __init__(
        self,
        generation: Generation,
        *,
        request_id: str,
        created: int,
        model: str,
        body: CompletionRequest,
        tokenizer: Tokenizer,
        prompt_only: bool,
    ) -> None:
        """Args: prompt_only: the answers, of one token, are not shown."""
        self._generation, self._body = generation, body
        self._tokenizer, self._prompt_only = tokenizer, prompt_only
        self._common = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        head = b"data: " + _dump(self._common)[:-1]
        self._head = head + b',"choices":[{"index":'
        self._no_choices = head + b',"choices":[],"usage":'
        self._begun = [False] * len(generation.parsers)
        self._offsets = [0] * len(generation.parsers)
        """Characters so far of every answer."""
        self._prompt_logprobs: dict[int, list[Logprobs | None]] = {}
        """By prompt: its first answer brings them."""

    def batch(self, batch: Batch) -> bytes:
        """See `endpoint.Format`."""
        tail = b"]}\n\n"
        if self._body.continuous_usage:
            tail = b'],"usage":' + _dump(self._usage()) + b"}\n\n"
        self._keep_prompt_logprobs(batch)
        chunks = []
        for piece in batch.pieces:
            output, first = piece.output, not self._begun[piece.answer]
            self._begun[piece.answer] = True
            if not (output.text or output.token_ids or output.finish_reason or first):
                continue
            if first or self._body.logprobs is not None or self._body.return_token_ids or output.finish_reason:
                chunks.append(self._head[: -len(b'{"index":')] + _dump(self._choice(batch, piece, first)) + tail)
            else:
                chunks.append(
                    self._head
                    + b'%d,"text":%b,"logprobs":null,"finish_reason":null}' % (piece.answer, _dump(output.text))
                    + tail
                )
        return b"".join(chunks)

    def end(self) -> bytes:
        """See `endpoint.Format`."""
        if not self._body.includes_usage:
            return _DONE
        return self._no_choices + _dump(self._usage()) + b"}\n\n" + _DONE

    def failed(self, error: ErrorReply) -> bytes:
        """See `endpoint.Format`."""
        return b"data: " + error.body() + b"\n\n" + _DONE

    def whole(self, batches: list[Batch]) -> bytes:
        """See `endpoint.Format`."""
        choices = []
        for batch in batches:
            self._keep_prompt_logprobs(batch)
            for piece in batch.pieces:
                choice = self._choice(batch, piece, first=True)
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs_fields(self._prompt_logprobs.get(batch.prompt))
                choices.append(choice)
        return _dump({**self._common, "choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        found = usage_fields(self._generation.usage)
        if self._prompt_only:
            found["completion_tokens"], found["total_tokens"] = 0, found["prompt_tokens"]
        return found

    def _keep_prompt_logprobs(self, batch: Batch) -> None:
        if batch.output.prompt_logprobs is not None:
            self._prompt_logprobs[batch.prompt] = batch.output.prompt_logprobs

    def _choice(self, batch: Batch, piece: Piece, first: bool) -> dict[str, Any]:
        """A choice with what is new; `first`: with the echo, if there is to be one."""
        output = piece.output
        text, token_ids = output.text, output.token_ids
        entries: list[Logprobs | None] = list(output.logprobs or ())
        if self._prompt_only:
            text, token_ids, entries = "", [], []
        if self._body.echo and first:
            text = self._prompt_text(batch.output) + text
            token_ids = [*batch.output.prompt_token_ids, *token_ids]
            entries = [*self._prompt_logprobs.get(batch.prompt, ()), *entries]
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(piece.answer, token_ids, entries, self._body.logprobs)
        found: dict[str, Any] = {
            "index": piece.answer,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._body.return_token_ids:
            found["token_ids"] = [] if self._prompt_only else output.token_ids
            if first:
                found["prompt_token_ids"] = batch.output.prompt_token_ids
        return found

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(self, index: int, token_ids: list[int], entries: list[Logprobs | None], most: int) -> dict[str, Any]:
        """OpenAI's old form: lists side by side, one entry per token."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=False):
            data = self._tokenizer.token_bytes(token_id)
            text = data.decode("utf-8", "replace")
            found["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if entry is None else max(entry[token_id].logprob, -9999.0))
            best = sorted((entry or {}).items(), key=lambda one: -one[1].logprob)
            kept = {token for token, _ in best[:most]} | {token_id}
            found["top_logprobs"].append(
                entry and {one.decoded_token or "": max(one.logprob, -9999.0) for token, one in best if token in kept}
            )
        return found
