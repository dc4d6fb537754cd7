"""A core that answers from a script, for tests of the layer above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

from flint_runtime.engine_core import CoreStats, EngineCore
from flint_runtime.executors.base import Executor
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.request import CoreOutput, EngineRequest, TokenOutput
from flint_runtime.tokenizer import Tokenizer
from tests.shapes import NANO_DIRECTORY

TOKENIZER = Tokenizer(NANO_DIRECTORY)
EOS = TOKENIZER.eos_token_ids[0]


def echo(request: EngineRequest) -> list[int]:
    """The prompt again, then the end."""
    return [*request.prompt, EOS]


class FakeCore:
    """Gives every request the next `per_step` tokens of its answer at every step."""

    def __init__(self, answer: Callable[[EngineRequest], Sequence[int]] = echo, per_step: int = 1) -> None:
        self.answer, self.per_step = answer, per_step
        self.max_model_len = 1000
        self.vocab_size = TOKENIZER.vocab_size
        self.running: dict[str, tuple[EngineRequest, list[int]]] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.fail: BaseException | None = None
        """Raised by the next step."""
        self.before_step: Callable[[], None] = lambda: None

    def add(self, request: EngineRequest) -> None:
        self.running[request.request_id] = (request, list(self.answer(request))[: request.max_tokens])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[CoreOutput]:
        self.before_step()
        if self.fail is not None:
            raise self.fail
        self.steps += 1
        return [self._next(*self.running[name]) for name in list(self.running)]

    def stats(self) -> CoreStats:
        values: dict[str, Any] = {f.name: 0 for f in fields(CoreStats)}
        return CoreStats(**{**values, "running": len(self.running)})

    def _next(self, request: EngineRequest, left: list[int]) -> CoreOutput:
        request.scheduled = request.scheduled or time.monotonic()
        new = left[: self.per_step]
        del left[: self.per_step]
        stops = [i for i, token in enumerate(new) if token in request.stop_token_ids]
        new = new[: stops[0] + 1] if stops else new
        if stops or not left:
            del self.running[request.request_id]
        tokens = tuple(TokenOutput(token, -0.5, (token, 1), (-0.5, -2.0), 1) for token in new)
        return CoreOutput(request.request_id, tokens, "stop" if stops else None if left else "length")


def fake_engine(core: FakeCore, tokenizer: Tokenizer = TOKENIZER) -> LLMEngine:
    """The request layer over a fake core."""
    executor = SimpleNamespace(config=SimpleNamespace(vocab_size=TOKENIZER.vocab_size), close=lambda: None)
    return LLMEngine(cast(EngineCore, core), cast(Executor, executor), tokenizer)
