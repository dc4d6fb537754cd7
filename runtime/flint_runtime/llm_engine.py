"""LLMEngine: requests in words above the core's requests in ids. LLM and AsyncLLM both run on it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from flint_runtime.arguments import integer, path
from flint_runtime.chat.template import template_options
from flint_runtime.engine import Engine
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import EngineDeadError, UsageError, shown
from flint_runtime.executors import ExecutorChoice, open_executor
from flint_runtime.executors.base import Executor
from flint_runtime.metrics import Metrics
from flint_runtime.output_processor import OutputProcessor
from flint_runtime.outputs import RequestOutput
from flint_runtime.prompts import Prompt as Prompt
from flint_runtime.prompts import split_prompt
from flint_runtime.request import EngineRequest, Grammar
from flint_runtime.request_check import check_id, check_request
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.structured import GrammarCompiler, thinking_budget
from flint_runtime.token_rules import TokenRules
from flint_runtime.tokenizer import Message, Tokenizer, Tool


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

    def __init__(
        self, core: EngineCore, executor: Executor, tokenizer: Tokenizer, draw_seed: Callable[[], int] | None = None
    ) -> None:
        """Take over a core, and the executor that it runs on; nobody else may use them.

        Args:
            draw_seed: gives requests without a seed one of 64 bits; None for the system's random numbers.
        """
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self.max_model_len = core.max_model_len
        self._core, self._executor = core, executor
        self._vocab_size = executor.config.vocab_size
        self._draw_seed = draw_seed
        self._outputs = OutputProcessor(tokenizer, self.metrics)
        self._process = os.getpid()
        self._closed = False
        self._grammar_lock = threading.Lock()
        self._grammar_compiler: GrammarCompiler | None = None

    @classmethod
    def open(cls, directory: Path, executor: ExecutorChoice, config: CoreConfig, seed: int | None = None) -> LLMEngine:
        """Open an engine directory. Raises what `open_executor` and `EngineCore` do.

        Args:
            seed: makes the draws of requests without a seed reproducible, if they come in the same order.
        """
        engine = Engine.open(directory)
        tokenizer = Tokenizer(engine.directory)
        opened = open_executor(engine, executor)
        try:
            draw_seed = None if seed is None else partial(random.Random(seed).getrandbits, 64)
            return cls(EngineCore(opened, config), opened, tokenizer, draw_seed)
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        """Free the executor; requests that are running are lost. In a forked child nothing: it is the parent's."""
        if os.getpid() != self._process:
            return
        self._closed = True
        if self._grammar_compiler is not None:
            self._grammar_compiler.close()
        self._executor.close()

    def check_open(self) -> None:
        """Raise EngineDeadError where it was closed, and in a forked child: neither threads nor the GPU come with one.

        What was freed must not be touched any more, and no process of grammars be started that nobody ends.
        """
        if self._closed:
            raise EngineDeadError("This engine was shut down. Open it again.")
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
            EngineDeadError: the engine was closed, or this is a forked child.
        """
        self.check_open()
        check_id(request_id)
        arrival = time.monotonic()
        written, given = split_prompt(prompt)
        if given is None and (least := self.tokenizer.least_tokens(written or "")) >= self.max_model_len:
            raise UsageError(
                f"The prompt has {len(written or ''):,} characters, which are {least:,} tokens or more; this engine's "
                f"context is {self.max_model_len:,} tokens. Shorten it, or build the engine with a larger "
                "--max-context."
            )
        token_ids = self.tokenizer.encode(written or "") if given is None else given
        if params is not None and not isinstance(params, SamplingParams):
            raise UsageError(f"sampling_params must be SamplingParams, found {shown(params)}.")
        params = (params or SamplingParams()).with_defaults(self.tokenizer.defaults, self._draw_seed)
        eos = frozenset(self.tokenizer.eos_token_ids)
        structured = params.structured_outputs
        # A text that matches its grammar can only end: then ignore_eos has no say.
        is_whole = structured is not None and (structured.calls is None or not structured.calls.free)
        stop = frozenset(params.stop_token_ids) | (eos if is_whole or not params.ignore_eos else frozenset())
        thinking = self.tokenizer.opens_thinking(token_ids)
        rules = TokenRules(params, self.tokenizer, self._vocab_size)
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
                grammar=rules.answer(self._grammar(params, thinking)),
            )
            for index in range(params.n)
        ]
        return PreparedRequest(request_id, written, choices)

    def prepare_chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> PreparedRequest:
        """`prepare` for a conversation, rendered by the checkpoint's template or another; see `ChatTemplate.render`."""
        prompt = self.tokenizer.render_chat(
            messages,
            tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_options(chat_template_kwargs),
        )
        return self.prepare(request_id, prompt, params)

    def add_request(self, request: PreparedRequest) -> None:
        """Queue a request. Whatever stops that, nothing of it is left.

        Raises:
            UsageError: one of that id is running, this one was started before, or the core cannot serve it.
            EngineDeadError: the engine has failed or was closed, or this is a forked child.
        """
        self.check_open()
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

    def _grammar(self, params: SamplingParams, thinking: bool) -> Grammar | None:
        """What one answer must match; None for anything."""
        structured, budget = params.structured_outputs, params.thinking_token_budget
        if structured is not None:
            return self._grammars.compile(structured, thinking, budget)
        return thinking_budget(self.tokenizer, self._vocab_size, budget) if thinking and budget is not None else None

    @property
    def _grammars(self) -> GrammarCompiler:
        """Made with the first request that wants it; requests are prepared in many threads."""
        with self._grammar_lock:
            if self._grammar_compiler is None:
                self._grammar_compiler = GrammarCompiler(self.tokenizer, self._vocab_size)
            return self._grammar_compiler

    def _token_budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens may be generated: max_tokens, or what the context leaves if less. Raises UsageError."""
        context = self.max_model_len
        if not prompt_tokens:
            raise UsageError("The prompt is empty; a generation needs at least one token to start from.")
        if prompt_tokens >= context:
            raise UsageError(
                f"The prompt has {prompt_tokens} tokens; this engine's context is {context} tokens, and at least one "
                "must be left for the answer. Shorten the prompt, or build the engine with a larger --max-context."
            )
        left = context - prompt_tokens
        return left if max_tokens is None else min(max_tokens, left)


def engine_opener(
    model: object, executor: object, seed: object, core_config: Mapping[str, Any]
) -> Callable[[], LLMEngine]:
    """What opens an engine with the arguments of `LLM`, which are checked at once. Raises UsageError."""
    directory = path("model", model)
    if executor not in get_args(ExecutorChoice):
        raise UsageError(f"executor must be one of {', '.join(get_args(ExecutorChoice))}; found {shown(executor)}.")
    known = [field.name for field in fields(CoreConfig)]
    unknown = [name for name in core_config if name not in known]
    if unknown:
        raise UsageError(f"There is no option {unknown[0]}; there are {', '.join(('seed', *known))}.")
    number = None if seed is None else integer("seed", seed, -(2**63), 2**64 - 1)
    return partial(LLMEngine.open, directory, cast("ExecutorChoice", executor), CoreConfig(**core_config), number)
