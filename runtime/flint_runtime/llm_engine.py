"""LLMEngine: requests in words above the core's requests in ids. LLM and AsyncLLM both run on it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flint_runtime.engine import Engine
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import EngineDeadError, UsageError
from flint_runtime.executors import ExecutorChoice, open_executor
from flint_runtime.executors.base import Executor
from flint_runtime.metrics import Metrics
from flint_runtime.output_processor import OutputProcessor
from flint_runtime.outputs import RequestOutput
from flint_runtime.request import EngineRequest
from flint_runtime.request_check import check_id, check_request
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.structured import GrammarCompiler
from flint_runtime.tokenizer import Message, Tokenizer, Tool

Prompt = str | Sequence[int]
"""A text, in which special tokens are recognised, or token ids."""


@dataclass(frozen=True)
class PreparedRequest:
    """A request that was checked: its prompt's text if it came as one, and what the core gets for its n answers."""

    request_id: str
    prompt: str | None
    choices: list[EngineRequest]


class LLMEngine:
    """Runs requests, a step at a time. Not thread-safe but for `prepare` and what it stands on.

    Attributes:
        tokenizer: the checkpoint's.
        metrics: of every request so far.
        max_model_len: most tokens of a prompt and its answer.
    """

    def __init__(self, core: EngineCore, executor: Executor, tokenizer: Tokenizer) -> None:
        """Take over a core, and the executor that it runs on; nobody else may use them."""
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self.max_model_len = core.max_model_len
        self._core, self._executor = core, executor
        self._outputs = OutputProcessor(tokenizer, self.metrics)
        self._process = os.getpid()

    @classmethod
    def open(cls, directory: Path, executor: ExecutorChoice, config: CoreConfig) -> LLMEngine:
        """Open an engine directory. Raises what `open_executor` and `EngineCore` do."""
        engine = Engine.open(directory)
        tokenizer = Tokenizer(engine.directory)
        opened = open_executor(engine, executor)
        try:
            return cls(EngineCore(opened, config), opened, tokenizer)
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        """Free the executor; requests that are running are lost. In a forked child nothing: it is the parent's."""
        if os.getpid() != self._process:
            return
        if "_grammars" in self.__dict__:
            self._grammars.close()
        self._executor.close()

    def check_process(self) -> None:
        """Raise EngineDeadError in a forked child: neither threads nor the GPU come with a fork."""
        if os.getpid() != self._process:
            raise EngineDeadError(
                f"This engine was opened in process {self._process}; process {os.getpid()}, which was forked from it, "
                "has none. Open the engine in the process that uses it; for multiprocessing, use the start method "
                '"spawn".'
            )

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> PreparedRequest:
        """Check a request and put it in the core's terms. May be called from any thread.

        Raises:
            UsageError: the request cannot be served.
            EngineDeadError: this is a forked child.
        """
        self.check_process()
        check_id(request_id)
        arrival = time.monotonic()
        if isinstance(prompt, str) and (least := self.tokenizer.least_tokens(prompt)) >= self.max_model_len:
            raise UsageError(
                f"The prompt has {len(prompt):,} characters, which are {least:,} tokens or more; this engine's context "
                f"is {self.max_model_len:,} tokens. Shorten it, or build the engine with a larger --max-context."
            )
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if any(type(token) is not int for token in token_ids):
            raise UsageError(f"The prompt must be a text or token ids, found {prompt!r:.100}.")
        params = (params or SamplingParams()).with_defaults(self.tokenizer.defaults)
        eos = frozenset(self.tokenizer.eos_token_ids)
        structured = params.structured_outputs
        # A text that matches its grammar can only end: then ignore_eos has no say.
        stop = frozenset(params.stop_token_ids) | (eos if structured or not params.ignore_eos else frozenset())
        thinking = self.tokenizer.opens_thinking(token_ids)
        first = EngineRequest(
            request_id,
            token_ids,
            params,
            max_tokens=self._token_budget(len(token_ids), params.max_tokens),
            stop_token_ids=stop,
            eos_token_ids=eos,
            arrival=arrival,
        )
        check_request(first, vocab_size=self._core.vocab_size, max_model_len=self.max_model_len)
        choices = [
            replace(
                first,
                request_id=f"{request_id}#{index}",
                params=params.choice(index),
                grammar=self._grammars.compile(structured, thinking) if structured else None,
            )
            for index in range(params.n)
        ]
        return PreparedRequest(request_id, prompt if isinstance(prompt, str) else None, choices)

    def prepare_chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Tool] | None = None,
        **template_kwargs: Any,
    ) -> PreparedRequest:
        """`prepare` for a conversation, rendered by the checkpoint's template."""
        return self.prepare(request_id, self.tokenizer.render_chat(messages, tools, **template_kwargs), params)

    def add_request(self, request: PreparedRequest) -> None:
        """Queue a request. Whatever stops that, nothing of it is left.

        Raises:
            UsageError: one of that id is running, this one was started before, or the core cannot serve it.
            EngineDeadError: the engine has failed, or this is a forked child.
        """
        self.check_process()
        check_id(request.request_id)
        if request.request_id in self._outputs:
            raise UsageError(f"A request with the id {request.request_id!r} is running; ids must differ.")
        if any(choice.started for choice in request.choices):
            raise UsageError(f"Request {request.request_id!r} was started before; prepare another one.")
        try:
            self._outputs.add_request(request.request_id, request.prompt, request.choices)
            for choice in request.choices:
                self._core.add(choice)
        except BaseException:
            self._outputs.forget(request.request_id)
            for choice in request.choices:
                self._core.abort(choice.request_id)
            raise
        for choice in request.choices:
            choice.started = True

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request: its last output, with finish_reason "abort"; None if it is not running."""
        if request_id not in self._outputs:
            return None
        output, aborts = self._outputs.abort(request_id)
        for core_id in aborts:
            self._core.abort(core_id)
        return output

    def abort_all(self) -> None:
        """End every request, without a last output."""
        for request_id in self._outputs.request_ids():
            self.abort_request(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step of the core: what it brought, one output per request at most.

        Raises:
            EngineDeadError: the executor has failed, and nothing can run any more.
        """
        outputs, aborts = self._outputs.process(self._core.step())
        for core_id in aborts:
            self._core.abort(core_id)
        if len(self._outputs) and not self._core.has_work():
            outputs += self._outputs.fail_all("The engine has lost this request: a bug of ours.")
        return outputs

    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return self._core.has_work() or self.has_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not had its last output."""
        return len(self._outputs) > 0

    def snapshot(self) -> dict[str, Any]:
        """Every metric as plain values; see `Metrics.snapshot`. From any thread: it reads numbers only."""
        return self.metrics.snapshot(self._core.stats())

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._executor.config.vocab_size)

    def _token_budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens may be generated: max_tokens, or what the context leaves. Raises UsageError."""
        context = self.max_model_len
        if not prompt_tokens:
            raise UsageError("The prompt is empty; a generation needs at least one token to start from.")
        if prompt_tokens >= context:
            raise UsageError(
                f"The prompt has {prompt_tokens} tokens; this engine's context is {context} tokens, and at least one "
                "must be left for the answer. Shorten the prompt, or build the engine with a larger --max-context."
            )
        if max_tokens is None:
            return context - prompt_tokens
        if prompt_tokens + max_tokens > context:
            raise UsageError(
                f"The prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together more than this "
                f"engine's context of {context} tokens. Lower max_tokens to {context - prompt_tokens}, or shorten the "
                "prompt."
            )
        return max_tokens
