"""What goes wrong ends one request or one step, never the engine; and after any exception the books are whole."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flint_runtime
from flint_runtime import engine_core
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import EngineDeadError, FlintError
from flint_runtime.executors.base import Pending, StepResult
from flint_runtime.executors.step import StepError
from flint_runtime.llm import LLM
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.manifest import Limits
from flint_runtime.request import EngineRequest
from flint_runtime.sampling_params import SamplingParams
from tests.runtime.cores import Collected, check_accounting, check_idle, request, run
from tests.runtime.fake_core import TOKENIZER
from tests.runtime.fake_executor import FAKE, FakeExecutor, expected_tokens

LIMITS = Limits(max_batch=4, max_context=512, prefill_chunk=96)
NANO_FAKE = FAKE.model_copy(update={"vocab_size": TOKENIZER.vocab_size})
METHODS = ("submit", "begin_sequence", "set_logit_bias", "set_token_mask", "copy_slots")


class Unreliable(FakeExecutor):
    """Calls `trouble` with the name of each method before it runs, and after it has run."""

    def __init__(self, trouble: Callable[[str], None] = lambda name: None, **options: Any) -> None:
        super().__init__(LIMITS, **options)
        self.trouble = trouble
        self.broken = False
        """Nothing works any more."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in METHODS:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._touch(name)
            result = found(*arguments, **options)
            self._touch(f"after {name}")
            return _Unreliable(self, result) if name == "submit" else result

        return call

    def _touch(self, name: str) -> None:
        if self.broken:
            raise FlintError("the GPU is lost")
        self.trouble(name)

    def discard(self) -> None:
        """Fails where nothing works any more."""
        if self.broken:
            raise FlintError("the GPU is lost")
        super().discard()


class _Unreliable(Pending):
    def __init__(self, executor: Unreliable, pending: Pending) -> None:
        self._executor, self._pending = executor, pending

    def done(self) -> bool:
        """As the step's, after trouble."""
        self._executor._touch("done")
        return self._pending.done()

    def result(self) -> StepResult:
        """As the step's, after trouble."""
        self._executor._touch("result")
        return self._pending.result()


class Once:
    """Raises at the n-th of some calls."""

    def __init__(self, names: tuple[str, ...], number: int, error: BaseException) -> None:
        self.names, self.left, self.error = names, number, error

    def __call__(self, name: str) -> None:
        if name in self.names:
            self.left -= 1
            if self.left == 0:
                raise self.error

    @property
    def raised(self) -> bool:
        """Whether it has."""
        return self.left <= 0


class Even:
    """A grammar of even tokens, in which something may go wrong."""

    def __init__(self, trouble: Callable[[str], None] = lambda name: None, tokens: int = 64) -> None:
        self.trouble, self.tokens = trouble, tokens

    triggers: frozenset[int] | None = None
    """See `Grammar`: every token changes what is allowed."""

    def mask(self, ahead: int = 0) -> npt.NDArray[np.int32]:
        """See `Grammar`."""
        self.trouble("mask")
        return np.full(self.tokens // 32, 0x55555555, np.int32)

    def accept(self, token_id: int) -> bool:
        """See `Grammar`."""
        self.trouble("accept")
        return token_id % 2 == 0

    def wait(self, seconds: float) -> bool:
        """See `Grammar`."""
        self.trouble("wait")
        return True

    @property
    def error(self) -> str | None:
        """See `Grammar`."""
        return None

    @property
    def finished(self) -> bool:
        """See `Grammar`."""
        self.trouble("finished")
        return False


def open_core(executor: FakeExecutor, **options: Any) -> EngineCore:
    given: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_memory_bytes": 1 << 24} | options
    return EngineCore(executor, CoreConfig(**given))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * i) % 64 for i in range(length)]


def requests(trouble: Callable[[str], None] = lambda name: None) -> list[EngineRequest]:
    """One of each kind, more than run at once; "grammar" is the one in whose grammar there is trouble."""
    return [
        request("plain", prompt(100), 12),
        request("logprobs", prompt(70, 1), 9, prompt_logprobs=1, logprobs=2),
        request("grammar", prompt(40, 2), 10, grammar=Even(trouble)),
        request("penalties", prompt(130, 3), 10, presence_penalty=0.5, temperature=1.0, seed=3),
        request("bias", prompt(30, 4), 8, logit_bias={3: 1.0}, min_tokens=4, stop=[7, 8]),
        request("shares", [*prompt(100), 1], 6),
    ]


_EXPECTED: dict[str, list[int]] = {}


def expected(one: EngineRequest) -> list[int]:
    """Of one of `requests`."""
    if one.request_id not in _EXPECTED:
        masks = itertools.repeat(Even().mask()) if one.grammar else None
        _EXPECTED[one.request_id] = expected_tokens(one, masks=masks)
    return _EXPECTED[one.request_id]


def check_outcome(found: Collected, every: list[EngineRequest], failed: set[str]) -> None:
    """Those in `failed` have ended with an error; the others have the tokens that they have alone."""
    for one in every:
        tokens, last = found.tokens(one.request_id), found.last(one.request_id)
        if one.request_id in failed:
            assert last.finish_reason == "error" and last.error
            assert tokens == expected(one)[: len(tokens)]
        else:
            assert (tokens, last.finish_reason in ("stop", "length")) == (expected(one), True), last


# --- One request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mask", "accept", "wait", "finished"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_grammar_that_fails_ends_its_request(name: str, number: int) -> None:
    trouble = Once((name,), number, RuntimeError("the parser panicked"))
    executor = Unreliable()
    core = open_core(executor)
    every = requests(trouble)
    found = run(core, every)
    assert trouble.raised and "the parser panicked" in (found.last("grammar").error or "")
    check_outcome(found, every, {"grammar"})
    check_idle(core)
    assert len(executor.steps) < 50, "nobody is computed again"
    check_outcome(run(core, again := requests()), again, set())


def test_a_mask_of_a_wrong_shape_ends_its_request() -> None:
    core = open_core(FakeExecutor(LIMITS))
    bad = request("bad", prompt(20), 5, grammar=Even(tokens=32))
    found = run(core, [*requests(), bad])
    check_outcome(found, requests(), set())
    assert found.last("bad").finish_reason == "error"
    check_idle(core)


@pytest.mark.parametrize("name", ["begin_sequence", "set_logit_bias", "set_token_mask"])
def test_a_slot_that_cannot_be_prepared_ends_its_request(name: str) -> None:
    """At whichever call: one request ends, and nobody is computed again."""
    for number in itertools.count(1):
        trouble = Once((name,), number, StepError("there is no such slot"))
        executor = Unreliable(trouble)
        core = open_core(executor)
        every = requests()
        found = run(core, every)
        failed = {name for name in found.outputs if found.last(name).finish_reason == "error"}
        assert len(failed) == trouble.raised
        check_outcome(found, every, failed)
        check_idle(core)
        if not trouble.raised:
            break
    assert number > 1


def test_numbers_that_do_not_fit_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the check before does not know of."""
    monkeypatch.setattr(engine_core, "check_request", lambda *_, **__: None)
    core = open_core(executor := FakeExecutor(LIMITS))
    bad = [request(f"bad{i}", prompt(30), 5, seed=1) for i in range(4)]
    for one, (name, value) in zip(
        bad, [("temperature", 1e39), ("presence_penalty", "x"), ("top_k", 1 << 40), ("top_p", None)], strict=True
    ):
        object.__setattr__(one.params, name, value)
    every = requests()
    found = Collected()
    for one in (*bad[:2], *every, *bad[2:]):
        try:
            core.add(one)
        except Exception:
            assert one is bad[3]
    while core.has_work():
        found.add(core.step())
    check_outcome(found, every, set())
    assert all(found.last(one.request_id).finish_reason == "error" for one in bad[:3])
    check_idle(core)
    assert len(executor.steps) < 50


def test_an_answer_that_cannot_be_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise ValueError("no such row")

    monkeypatch.setattr(engine_core, "token_output", fail)
    core = open_core(FakeExecutor(LIMITS))
    found = run(core, every := requests())
    check_outcome(found, every, {"logprobs"})
    check_idle(core)


# --- Steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("submit", StepError("malformed")),
        ("after submit", RuntimeError("no kernel")),
        ("copy_slots", StepError("no such slot")),
        ("result", RuntimeError("no kernel")),
        ("result", MemoryError()),
        ("done", FlintError("no such event")),
    ],
)
def test_a_step_that_fails_ends_the_requests_in_it(name: str, error: Exception) -> None:
    """Whichever step; the others are computed again, to the same tokens, and nothing of the failed step is used."""
    for number in itertools.chain(range(1, 16, 2), [1000]):
        trouble = Once((name,), number, error)
        executor = Unreliable(trouble)
        core = open_core(executor)
        every = requests()
        for one in every:
            core.add(one)
        found, failed_in = Collected(), None
        while core.has_work():
            raised = trouble.raised
            outputs = core.step()
            if trouble.raised and not raised:
                failed_in = {o.request_id for o in outputs if o.finish_reason == "error"}
                check_accounting(core)
            found.add(outputs)
        failed = {one.request_id for one in every if found.last(one.request_id).finish_reason == "error"}
        assert failed == (failed_in or set()) and len(failed) <= 3
        check_outcome(found, every, failed)
        check_idle(core)
        if not trouble.raised:
            break
        assert failed
        check_outcome(run(core, again := requests()), again, set())


@pytest.mark.parametrize("name", ["submit", "result", "begin_sequence"])
def test_an_executor_that_is_broken_ends_everything_at_once(name: str) -> None:
    executor = Unreliable()
    core = open_core(executor)
    for one in requests():
        core.add(one)
    for _ in range(3):
        core.step()
    executor.trouble = lambda called: setattr(executor, "broken", called == name or executor.broken)
    with pytest.raises(EngineDeadError, match="the GPU is lost"):
        for _ in range(10):
            core.step()
    with pytest.raises(EngineDeadError, match="the GPU is lost"):
        core.add(request("later", prompt(10), 5))
    with pytest.raises(EngineDeadError, match="the GPU is lost"):
        core.step()
    core.abort("plain")


def test_a_bug_in_the_scheduler_ends_who_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the engine; and it comes to an end where every step fails."""
    core = open_core(FakeExecutor(LIMITS))
    every = requests()
    for one in every:
        core.add(one)
    monkeypatch.setattr(engine_core.Scheduler, "schedule", lambda self: 1 / 0)
    found = Collected()
    for _ in range(20):
        found.add(core.step())
    assert not core.has_work()
    assert all("ZeroDivisionError" in (found.last(one.request_id).error or "") for one in every)
    monkeypatch.undo()
    check_idle(core)
    check_outcome(run(core, again := requests()), again, set())


@pytest.mark.parametrize("name", ["add", "finish", "schedule", "step_read", "record"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_fault_in_the_books_themselves(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Wherever it shows, in adding, aborting or a step: the books are whole again, and the engine goes on."""
    core = open_core(FakeExecutor(LIMITS))
    original, trouble = getattr(engine_core.Scheduler, name), Once((name,), number, KeyError("books"))

    def fail(self: Any, *arguments: Any) -> Any:
        trouble(name)
        return original(self, *arguments)

    monkeypatch.setattr(engine_core.Scheduler, name, fail)
    every, found = requests(), Collected()
    added = []
    for one in every:
        with contextlib.suppress(KeyError):
            core.add(one)
            added.append(one)
    for one in every:  # Whose addition failed may have been taken or not; who added it aborts it.
        if one not in added:
            core.abort(one.request_id)
    for _ in range(4):
        found.add(core.step())
    core.abort("plain")
    check_accounting(core)
    while core.has_work():
        found.add(core.step())
    assert trouble.raised
    check_idle(core)
    for one in added:
        last = found.outputs.get(one.request_id, [None])[-1]
        if one.request_id != "plain" and last is not None and last.finish_reason != "error":
            assert found.tokens(one.request_id) == expected(one)
    monkeypatch.undo()
    check_outcome(run(core, again := requests()), again, set())


# --- Interrupts -------------------------------------------------------------------------------------------------------

OURS = (str(Path(flint_runtime.__file__).parent), str(Path(__file__).with_name("fake_executor.py")))


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line of our code that runs, as Ctrl-C does; n counts from 1."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.lines = set(numbers), 0

    def __enter__(self) -> Interrupts:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        # What is handed out is the caller's, and the callers here keep nothing of an interrupted call.
        ours = frame.f_code.co_filename.startswith(OURS) and frame.f_code is not EngineCore._hand_out.__code__
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines in self.numbers:
                raise KeyboardInterrupt
        return self._line


def open_llm() -> tuple[LLM, EngineCore]:
    """LLM over the fake executor."""
    executor = FakeExecutor(LIMITS, NANO_FAKE)
    core = open_core(executor, max_num_seqs=2)
    llm = LLM.__new__(LLM)
    llm._engine, llm._next_id = LLMEngine(core, executor, TOKENIZER), 0
    return llm, core


PROMPTS = [prompt(70), prompt(12, 1), prompt(66, 2)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={5: 2.0}, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0, max_tokens=4, min_tokens=2, stop_token_ids=[9], presence_penalty=0.3),
]


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    return generate(open_llm()[0])


def test_answers_are_those_of_each_alone(answers: list[list[int]]) -> None:
    alone = [request(str(i), p, len(a)) for i, (p, a) in enumerate(zip(PROMPTS, answers, strict=True))][:1]
    assert answers[0] == expected_tokens(alone[0], NANO_FAKE)


def interrupted(llm: LLM, core: EngineCore, answers: list[list[int]], *numbers: int) -> int:
    """Generate with interrupts; afterwards all is whole. The lines that ran."""
    with Interrupts(*numbers) as interrupts, contextlib.suppress(KeyboardInterrupt):
        assert generate(llm) == answers
    if not core._torn:  # Else the next call makes the books anew.
        check_accounting(core)
    assert generate(llm) == answers, numbers
    check_idle(core)
    assert len(llm._engine._outputs) == 0
    return interrupts.lines


def test_ctrl_c_anywhere(answers: list[list[int]]) -> None:
    """At lines all over `LLM.generate`: all is whole, the next answers are right. On one engine: nothing adds up."""
    llm, core = open_llm()
    lines = interrupted(llm, core, answers)
    assert lines > 1000
    for number in range(1, lines + 1, max(1, lines // 80)):
        interrupted(llm, core, answers, number)


def test_ctrl_c_again_while_the_first_is_handled(answers: list[list[int]]) -> None:
    llm, core = open_llm()
    lines = interrupted(llm, core, answers)
    for number in range(1, lines + 1, max(1, lines // 30)):
        interrupted(llm, core, answers, number, number + 1 + number * 7 % 40)


def test_ctrl_c_costs_no_request_of_a_core_but_the_one_being_read() -> None:
    """Who steps a core and goes on after Ctrl-C has the same tokens of all others."""

    def drive(*numbers: int) -> tuple[int, set[str]]:
        core = open_core(FakeExecutor(LIMITS))
        every = requests()
        found = Collected()
        for one in every:
            core.add(one)
        with Interrupts(*numbers) as interrupts:
            working = True
            while working:
                try:
                    outputs = core.step()
                    found.add(outputs)
                    working = core.has_work()
                except KeyboardInterrupt:
                    if not core._torn:
                        check_accounting(core)
        failed = {one.request_id for one in every if found.last(one.request_id).finish_reason == "error"}
        check_outcome(found, every, failed)
        check_idle(core)
        return interrupts.lines, failed

    lines, failed = drive()
    assert not failed
    for number in range(1, lines + 1, max(1, lines // 30)):
        assert len(drive(number)[1]) <= 1
