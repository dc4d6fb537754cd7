"""The processes of grammars: what comes from outside ends none but its own, and holds up nobody."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.errors import ResourceError, UsageError
from flint_runtime.grammar_pool import GrammarPool, Session
from flint_runtime.grammar_worker import Limits, Vocabulary
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from flint_runtime.structured import GrammarCompiler
from flint_runtime.tokenizer import Tokenizer
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.hostile_grammars import HOSTILE
from tests.shapes import NANO, NANO_DIRECTORY

TOKENIZER = Tokenizer(NANO_DIRECTORY)
VOCABULARY = Vocabulary(
    TOKENIZER.to_json(),
    [TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)],
    [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.is_special(token)],
    list(TOKENIZER.eos_token_ids),
)
STRICT = Limits(compile_seconds=0.3, mask_seconds=0.1, memory_bytes=128 << 20)
"""So that the tests are quick."""
SLOW = "[xy]{20}((a{100}){100}){100}"
"""Compiled at once; computes for seconds where a token may reach the a."""


@pytest.fixture
def pool() -> Iterator[GrammarPool]:
    pool = GrammarPool(VOCABULARY, STRICT)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """The real engine over an executor that is none."""

    def make() -> LLMEngine:
        config = NANO.model_copy(update={"vocab_size": TOKENIZER.vocab_size})
        from tests.runtime.test_engine_core import LIMITS

        executor = FakeExecutor(LIMITS, config)
        core = EngineCore(executor, CoreConfig(max_num_seqs=4, kv_cache_memory_bytes=1 << 24))
        engine = LLMEngine(core, executor, TOKENIZER)
        engine._grammar_compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, STRICT)
        return engine

    with AsyncLLM.from_factory(make) as llm:
        yield llm


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: object, seconds: float = 20) -> None:
    """Wait for a function to return something true."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def server(pool: GrammarPool) -> int:
    assert pool._server is not None
    return pool._server._process.pid


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_harms_nobody(llm: AsyncLLM, name: str) -> None:
    """It is followed, refused, or ends its own request; a stream beside it goes on, and an ordinary grammar works."""
    hostile = SamplingParams(
        temperature=1.0, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(**HOSTILE[name])
    )
    delta = RequestOutputKind.DELTA
    endless = SamplingParams(temperature=1.0, seed=1, ignore_eos=True, output_kind=delta)
    gaps: list[float] = []

    async def bystander(ready: asyncio.Event) -> None:
        while not ready.is_set():
            last = time.monotonic()
            async for _ in llm.generate("who stands by", endless):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                if ready.is_set():
                    return

    async def attack() -> str:
        try:
            async for output in llm.generate("do", hostile):
                last = output
            return f"{last.outputs[0].finish_reason}: {last.outputs[0].error}"
        except UsageError as error:
            return f"refused: {error}"

    async def main() -> str:
        done = asyncio.Event()
        beside = asyncio.create_task(bystander(done))
        found = await asyncio.wait_for(attack(), 60)
        done.set()
        await beside
        good = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
        async for output in llm.generate("say", good):
            last = output
        assert last.outputs[0].text in ("yes", "no")
        return found

    found = asyncio.run(main())
    print(f"{name}: longest gap {max(gaps) * 1000:.0f} ms of {len(gaps)}; {found:.300}")
    assert found.startswith(("stop: None", "length: None")) or "structured_outputs" in found
    assert len(found) < 1000
    assert max(gaps) < 1.5


def test_whoever_takes_too_long_ends_with_an_error(pool: GrammarPool) -> None:
    """When it is compiled or at the token, and the pool works on."""
    with pytest.raises(UsageError, match=r"structured_outputs.grammar cannot be used: it takes too"):
        pool.open("grammar", 'start: "a" start')
    session = pool.open("regex", SLOW)
    _reach_the_slow_part(session)
    assert session.wait(20)
    assert session.error is not None and "takes too" in session.error and "0.1 s of processor time" in session.error
    assert not session.mask.any() and not session.finished
    assert pool.open("regex", "ab").mask.any()


def _reach_the_slow_part(session: Session) -> None:
    (letter,) = TOKENIZER.encode("x")
    for _ in range(20):
        session.advance(letter)
        if not session.wait(0.05) or session.error:
            return
    raise AssertionError("it was quick")


def test_nobody_waits_for_a_slow_token(pool: GrammarPool) -> None:
    """Neither the caller nor whoever has another grammar; the same grammar gets another process, once this one ends."""
    session = pool.open("regex", SLOW)
    other = pool.open("regex", "[ab]{9}")
    _reach_the_slow_part(session)
    begin = time.monotonic()
    assert not session.wait(0) or session.error
    assert time.monotonic() - begin < 0.5
    other.advance(TOKENIZER.encode("a")[0])
    assert other.wait(20) and other.mask.any()
    assert session.wait(20) and session.error
    assert pool.open("regex", SLOW).mask.any()


def test_a_process_that_is_killed(pool: GrammarPool) -> None:
    """Ends its answers with an error; the next answer gets a new one."""
    session = pool.open("regex", "[ab]{9}")
    (child,) = children(server(pool))
    os.kill(child, signal.SIGKILL)
    session.advance(TOKENIZER.encode("a")[0])
    assert session.wait(20) and session.error
    assert pool.open("regex", "[ab]{9}").mask.any() and pool.compiled == 2


def test_a_server_that_is_killed(pool: GrammarPool) -> None:
    """Is started again; answers go on meanwhile."""
    session = pool.open("regex", "[ab]{9}")
    first = server(pool)
    os.kill(first, signal.SIGKILL)
    until(lambda: pool._server is not None and not pool._server.is_running())
    session.advance(TOKENIZER.encode("a")[0])
    assert session.wait(20) and session.error is None
    assert pool.open("regex", "[cd]{9}").mask.any() and server(pool) != first


def test_processes_end_with_their_use(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the grammars that nobody uses the latest are kept, and none outlives the pool."""
    monkeypatch.setattr("flint_runtime.grammar_pool._CACHED_GRAMMARS", 2)
    sessions = [pool.open("regex", f"a{{{i}}}") for i in range(1, 6)]
    pid = server(pool)
    assert len(children(pid)) == 5
    del sessions[1:]
    until(lambda: len(children(pid)) == 3)
    found = children(pid)
    pool.close()
    del sessions[0]
    for child in found:
        until(lambda child=child: not Path(f"/proc/{child}").exists())


def test_the_number_of_grammars_in_use_is_limited(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flint_runtime.grammar_pool._MAX_GRAMMARS", 2)
    sessions = [pool.open("regex", name) for name in ("a", "b")]
    with pytest.raises(ResourceError, match="2 different grammars are in use"):
        pool.open("regex", "c")
    assert pool.open("regex", "b").mask.any() and pool.open("regex", "a").mask.any()
    sessions.clear()
    # Those that are cached and not used make room.
    assert pool.open("regex", "c").mask.any() and pool.open("regex", "d").mask.any()


@contextmanager
def open_files(most: int) -> Iterator[None]:
    """A limit of so many files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_no_file_can_be_opened(pool: GrammarPool) -> None:
    """The request is refused; those that have a place go on, and later ones find one."""
    session = pool.open("regex", "[ab]{9}")
    most = max(int(name) for name in os.listdir("/proc/self/fd")) + 8
    with open_files(most):
        with pytest.raises(ResourceError, match="ulimit -n"):
            [pool.open("regex", "[ab]{9}") for _ in range(most)]
        kept = [os.dup(0) for _ in range(most - len(os.listdir("/proc/self/fd")))]
        with pytest.raises(ResourceError, match="ulimit -n"):
            pool.open("regex", "[cd]{9}")
    for descriptor in kept:
        os.close(descriptor)
    session.advance(TOKENIZER.encode("a")[0])
    assert session.wait(20) and session.error is None
    assert pool.open("regex", "[ef]{9}").mask.any()


def test_many_answers_of_one_grammar(pool: GrammarPool) -> None:
    """More than a process may have files open by default: its process may have as many as the system lets it."""
    with open_files(100):
        pool.open("regex", "[ab]{9}")
    found = [pool.open("regex", "[ab]{9}") for _ in range(120)]
    assert all(session.mask.any() for session in found) and pool.compiled == 1


def test_a_grammar_that_has_grown_takes_nobody_more(pool: GrammarPool) -> None:
    """Its parser's states are shared; who comes later does not start with what others have filled."""
    text = "(.*)a.{200}"
    session = pool.open("regex", text)
    tokens = TOKENIZER.encode("abaabba" * 20)
    for token in tokens[:100]:
        session.advance(token)
        assert session.wait(20)
    assert session.error is None
    for _ in range(3):
        assert pool.open("regex", text).mask.any()
    assert pool.compiled <= 3


def test_nothing_is_left_of_an_engine_that_was_killed() -> None:
    code = """
import os, signal
from tests.runtime.test_grammar_pool import GrammarPool, STRICT, VOCABULARY, children, server
pool = GrammarPool(VOCABULARY, STRICT)
session = pool.open("regex", "ab")
print(server(pool), *children(server(pool)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pids = [int(pid) for pid in ran.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        with suppress(ProcessLookupError):
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    return ") Z" in Path(f"/proc/{pid}/stat").read_text()


def test_a_forked_child_leaves_the_server_alone() -> None:
    code = """
import os
from tests.runtime.test_grammar_pool import GrammarPool, STRICT, TOKENIZER, VOCABULARY, server
pool = GrammarPool(VOCABULARY, STRICT)
session = pool.open("regex", "[ab]{9}")
if not os.fork():
    raise SystemExit
os.wait()
session.advance(TOKENIZER.encode("a")[0])
assert session.wait(20) and session.error is None, session.error
pid = server(pool)
assert pool.open("regex", "[cd]{9}").mask.any() and server(pool) == pid
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_ctrl_c_is_for_the_engine(pool: GrammarPool) -> None:
    session = pool.open("regex", "[ab]{9}")
    for pid in (server(pool), *children(server(pool))):
        os.kill(pid, signal.SIGINT)
    session.advance(TOKENIZER.encode("a")[0])
    assert session.wait(20) and session.error is None
    assert pool.open("regex", "[cd]{9}").mask.any()


def test_a_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(ResourceError, match="The process that compiles grammars"):
            GrammarPool(VOCABULARY, STRICT).open("regex", "a")


def test_every_answer_has_memory_of_its_own() -> None:
    """Long answers of one grammar, which shared what one may take."""
    limits = Limits(compile_seconds=3.0, memory_bytes=40 << 20)
    pool = GrammarPool(VOCABULARY, limits)
    try:
        sessions = [pool.open("json", "{}") for _ in range(30)]
        for token in TOKENIZER.encode("[" + '{"a": [1, "text text", {"b": null}]}, ' * 20):
            for session in sessions:
                session.advance(token)
            assert all(session.wait(20) for session in sessions)
        assert pool.compiled == 1 and [session.error for session in sessions] == [None] * 30
    finally:
        pool.close()
