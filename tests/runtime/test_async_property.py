"""Whatever callers do, valid or not: a live AsyncLLM answers or refuses it, and a bystander's tokens do not change."""

from __future__ import annotations

import asyncio
import copy
import math
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import FlintError, UsageError
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.manifest import Limits
from flint_runtime.outputs import RequestOutput
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.runtime.cores import check_idle, request
from tests.runtime.fake_core import TOKENIZER
from tests.runtime.fake_executor import FAKE, FakeExecutor, expected_tokens

VOCABULARY = TOKENIZER.vocab_size
MODEL = FAKE.model_copy(update={"vocab_size": VOCABULARY})
LIMITS = Limits(max_batch=4, max_context=160, prefill_chunk=64)
BYSTANDER = [(7 * i) % VOCABULARY for i in range(70)]
BYSTANDER_TOKENS = 30
ACTIONS = 10
"""At once, besides the bystander."""
SECONDS = 10.0
"""Of the whole test: examples that begin later are empty."""
LONGEST_WAIT = 60.0
"""Of one call. None takes a tenth of it on a quiet machine, unless it waits for ever."""


class Nasty:
    """Fails at whatever is asked of it."""

    def _fail(self, *_: object) -> Any:
        raise RuntimeError("nasty")

    __repr__ = __str__ = __hash__ = __eq__ = __bool__ = __len__ = __iter__ = __float__ = __int__ = __index__ = _fail


JUNK = [
    None, True, 0, -1, 1, 2, 5, 63, VOCABULARY - 1, VOCABULARY, 2**31, 2**63, 2**64, 10**400, 10**5000, 0.0, 0.5, 1.0,
    1.5, -0.5, 1e-320, 1e38, 1e39, 1e308, math.nan, math.inf, -math.inf, "", "a", "7", "\ud800", "x" * 5000, b"a", [],
    ["a"], [1], [None], [[1]], (), {}, {"a": 1}, {5: 1e39}, {5: None}, {VOCABULARY: 1}, {1: 1.0}, [VOCABULARY], [-1],
    np.int64(3), np.float32(0.5), np.zeros(3), object(), Nasty(), SamplingParams
]  # fmt: skip


GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 1.0, 3.4e38, 1e-300],
    "top_p": [0.1, 1.0],
    "top_k": [-1, 0, 3, 2**31 - 1],
    "min_p": [0.0, 0.5, 1.0],
    "repetition_penalty": [0.1, 1.0, 3.4e38],
    "presence_penalty": [-2.0, 0.5],
    "frequency_penalty": [-2.0, 0.5],
    "logit_bias": [{0: 100.0, VOCABULARY - 1: -100.0}, {"5": 1}, {}],
    "seed": [0, -(2**63), 2**64 - 1],
    "n": [1, 2, 4],
    "max_tokens": [1, 2, 20, 100, 300],
    "min_tokens": [0, 1, 5],
    "stop": [["a", " "], "the", ["\n", "é"]],
    "stop_token_ids": [[0, VOCABULARY - 1], [5]],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [None, 0, 3, 20],
    "prompt_logprobs": [None, 0, 3],
    "structured_outputs": [StructuredOutputsParams(regex="[a-z ]{1,9}")],
    "output_kind": list(RequestOutputKind),
}
FAULTS = ["mask", "accept", "wait", "finished", "shape", "type"]


class Draw:
    """What callers may do, at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._choice = self._random.choice

    def action(self) -> tuple[Any, ...]:
        """A kind, and what the method of `Live` for it takes."""
        kind = self._choice([name.removeprefix("do_") for name in sorted(vars(Live)) if name.startswith("do_")])
        name = self._choice([None, None, "a", "b"])
        if kind == "generate":
            return kind, name, self._prompt(), self._params(), self._choice([None, None, 0, 3])
        if kind in ("wrong_params", "forced_params"):
            wrong = {self._choice(sorted(GOOD)): self._choice(JUNK) for _ in range(self._choice([1, 2]))}
            return kind, name, self._params(), wrong
        if kind == "wrong_prompt":
            return kind, name, self._choice([self._choice(JUNK), [1, self._choice(JUNK)]])
        if kind == "wrong_id":
            return kind, self._choice(JUNK)
        if kind == "abort":
            return kind, self._choice(["a", "b", self._choice(JUNK), ["a", self._choice(JUNK)], ("a", "b")])
        if kind == "cancel":
            return kind, self._prompt(), self._random.uniform(0, 0.005)
        return (kind, name, self._params()) if kind == "twice" else (kind, name, self._choice(FAULTS))

    def _prompt(self) -> list[int] | str:
        if self._random.random() < 0.3:
            return self._choice(["Hello", "x" * 100, "é</think>"])
        tokens = BYSTANDER if self._random.random() < 0.3 else self._random.sample(range(VOCABULARY), 80)
        return tokens[: self._random.randrange(1, 80)]

    def _params(self) -> dict[str, Any]:
        share = self._choice([0.0, 0.1, 0.3])
        return {name: self._choice(values) for name, values in GOOD.items() if self._random.random() < share}


class WrongGrammar:
    """A grammar that fails in one of its methods, at its third token."""

    def __init__(self, what: str) -> None:
        self._what, self._tokens = what, 0

    triggers: frozenset[int] | None = None
    """See `Grammar`: every token changes what is allowed."""

    def mask(self, ahead: int = 0) -> npt.NDArray[np.int32]:
        """See `Grammar`."""
        words = VOCABULARY // 32
        if self._tokens < 2:
            return np.full(words, -1, np.int32)
        if self._what == "mask":
            raise RuntimeError("no mask")
        return np.full(words - (self._what == "shape"), -1, np.int64 if self._what == "type" else np.int32)

    def accept(self, token_id: int) -> bool:
        """See `Grammar`."""
        self._tokens += 1
        if self._what == "accept" and self._tokens > 2:
            raise RecursionError
        return True

    def wait(self, seconds: float) -> bool:
        """See `Grammar`."""
        if self._what == "wait" and self._tokens > 2:
            raise BrokenPipeError
        return True

    @property
    def error(self) -> str | None:
        """See `Grammar`."""
        return None

    @property
    def finished(self) -> bool:
        """See `Grammar`."""
        if self._what == "finished" and self._tokens > 2:
            raise MemoryError
        return False


class Live:
    """An engine that lives through the whole test, and what is done with it."""

    def __init__(self, llm: AsyncLLM, core: EngineCore) -> None:
        self.llm, self.core = llm, core
        one = request("bystander", BYSTANDER, BYSTANDER_TOKENS)
        self.expected = expected_tokens(one, MODEL)

    async def bystander(self) -> None:
        """Streams, and gets the tokens that it gets alone."""
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=BYSTANDER_TOKENS, output_kind=RequestOutputKind.DELTA
        )
        found = [t async for o in self.llm.generate(BYSTANDER, params) for t in o.outputs[0].token_ids]
        assert found == self.expected

    async def listen(self, prompt: Any, params: Any, name: Any, most: int | None = None) -> RequestOutput | None:
        """The last output of `most`, or of all."""
        last = None
        async with aclosing(self.llm.generate(prompt, params, name)) as outputs:
            async for output in outputs:
                last = output
                if most is not None:
                    most -= 1
                    if most < 0:
                        break
        return last

    async def act(self, kind: str, *arguments: Any) -> None:
        """One action: it ends, and what it raises is ours."""
        await asyncio.wait_for(getattr(self, f"do_{kind}")(*arguments), LONGEST_WAIT)

    async def do_generate(self, name: Any, prompt: Any, params: dict[str, Any], most: int | None) -> None:
        """A request that is right: only that its id may be in use, or that it may not fit the context or end early."""
        try:
            last = await self.listen(prompt, SamplingParams(**params), name, most)
        except UsageError:
            return
        assert last is not None
        if most is None:
            assert last.finished and all(choice.finish_reason for choice in last.outputs)

    async def do_wrong_params(self, name: Any, params: dict[str, Any], wrong: dict[str, Any]) -> None:
        """Refused where they are made, or the request is, or they are fine after all."""
        try:
            made = SamplingParams(**params | wrong)
        except Exception:  # What it raises is tested with SamplingParams.
            return
        with suppress(UsageError):
            await self.listen([1, 2, 3], made, name)

    async def do_forced_params(self, name: Any, params: dict[str, Any], wrong: dict[str, Any]) -> None:
        """They come to the engine although nobody has checked them."""
        try:
            prepared = await self.llm.prepare([1, 2, 3], SamplingParams(**params), name)
        except UsageError:
            return
        for choice in prepared.choices:
            choice.params = copy.copy(choice.params)
            for key, value in wrong.items():
                object.__setattr__(choice.params, key, value)
        try:
            async for _ in self.llm.stream(prepared):
                pass
        except FlintError:
            pass

    async def do_wrong_prompt(self, name: Any, prompt: Any) -> None:
        try:
            await self.listen(prompt, SamplingParams(max_tokens=3), name)
        except Exception as error:  # Raised where it is called: see the tests of `prepare`.
            assert not isinstance(error, TimeoutError)

    async def do_wrong_id(self, name: Any) -> None:
        with suppress(UsageError):
            await self.listen([1, 2, 3], SamplingParams(max_tokens=3), name)

    async def do_abort(self, names: Any) -> None:
        with suppress(UsageError, RuntimeError):  # the latter is the nasty one's
            await self.llm.abort(names)

    async def do_cancel(self, prompt: Any, seconds: float) -> None:
        task = asyncio.create_task(self.listen(prompt, SamplingParams(), None))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait([task])

    async def do_twice(self, name: Any, params: dict[str, Any]) -> None:
        try:
            prepared = await self.llm.prepare([5, 6], SamplingParams(**params), name)
        except UsageError:
            return
        for _ in range(2):
            try:
                async for _ in self.llm.stream(prepared):
                    pass
            except UsageError:
                pass

    async def do_grammar(self, name: Any, what: str) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
        prepared = await self.llm.prepare([5, 6], params, name)
        prepared.choices[0].grammar = WrongGrammar(what)
        last = None
        try:
            async for output in self.llm.stream(prepared):
                last = output
        except UsageError:
            return
        assert last is not None and last.outputs[0].finish_reason in ("error", "abort")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    executor = FakeExecutor(LIMITS, MODEL)
    core = EngineCore(executor, CoreConfig(max_num_seqs=4, kv_cache_memory_bytes=1 << 24))
    with AsyncLLM.from_factory(lambda: LLMEngine(core, executor, TOKENIZER)) as llm:
        yield Live(llm, core)


_BEGIN: list[float] = []


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)
@given(seed=st.integers(0, 2**64 - 1))
def test_a_bystander_does_not_notice(live: Live, seed: int) -> None:
    _BEGIN[:] = _BEGIN or [time.monotonic()]
    if time.monotonic() - _BEGIN[0] > SECONDS:
        return
    draw = Draw(seed)
    actions = [draw.action() for _ in range(ACTIONS)]

    async def main() -> None:
        bystander = asyncio.create_task(live.bystander())
        await asyncio.gather(*(live.act(*action) for action in actions))
        await bystander
        while live.llm.snapshot()["running"] or live.llm.snapshot()["waiting"]:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 2 * LONGEST_WAIT))
    assert live.llm.is_running and not live.llm._worker._streams and not live.llm._preparing
    while live.core.has_work():
        time.sleep(0.001)
    check_idle(live.core)
