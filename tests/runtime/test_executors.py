"""What every executor owes its caller: order, results, states, refusals. The GPU executors run on a fake device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flint_plugins.library import ENVIRONMENT_VARIABLE
from flint_runtime.engine import Engine
from flint_runtime.executors import cuda, gpu_memory, tensorrt
from flint_runtime.executors.base import MAX_IN_FLIGHT, PROMPT_FLAG, Executor, StepResult
from flint_runtime.executors.cuda import CudaError
from flint_runtime.executors.gpu import GpuExecutor
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.staging import RESULT_ARRAYS
from flint_runtime.executors.step import RowSampling, SequencePart, Step, StepError, build_step, from_slot
from flint_runtime.executors.tensorrt import TensorRtExecutor
from flint_runtime.manifest import Phase
from tests.runtime.fake_cuda import FakeCuda, ReferenceHost
from tests.runtime.fake_tensorrt import FakeTensorRt

PROMPT = list(range(40, 150))
PAGES, SLOTS, SAMPLE_SLOTS = 12, 4, 3
GREEDY = RowSampling()

pytestmark = pytest.mark.usefixtures("one_thread")


def open_gpu(kind: str, directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch) -> GpuExecutor:
    """A GPU executor on the fake device, with states."""
    if kind == "plugin-host":
        executor: GpuExecutor = PluginHostExecutor(Engine.open(directory), plugins)
        ReferenceHost(executor, fake)  # type: ignore[arg-type]
    else:
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", FakeTensorRt(fake))  # type: ignore[arg-type]
        tensorrt._session.cache_clear()
        executor = TensorRtExecutor(Engine.open(directory), plugins)
    executor.allocate(PAGES, SLOTS, SAMPLE_SLOTS)
    return executor


@pytest.fixture(params=["plugin-host", "tensorrt"])
def gpu_executor(
    request: pytest.FixtureRequest, directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuExecutor]:
    executor = open_gpu(request.param, directory, fake, plugins, monkeypatch)
    yield executor
    executor.close()
    tensorrt._session.cache_clear()
    assert not fake.device and not fake.pinned


@pytest.fixture
def reference(directory: Path) -> ReferenceExecutor:
    return open_reference(directory)


def open_reference(directory: Path) -> ReferenceExecutor:
    """The reference executor, with states."""
    executor = ReferenceExecutor.open(directory)
    executor.allocate(PAGES, SLOTS, SAMPLE_SLOTS)
    return executor


@pytest.fixture(params=["plugin-host", "tensorrt", "reference"])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Any executor, with states."""
    if request.param == "reference":
        found: Executor = request.getfixturevalue("reference")
        return found
    arguments = [request.getfixturevalue(name) for name in ("directory", "fake", "plugins", "monkeypatch")]
    return open_gpu(request.param, *arguments)


class Sequence:
    """One sequence, its pages scattered, and how far it has come."""

    def __init__(self, index: int) -> None:
        self.index, self.length = index, 0
        self.pages = [[7, 2, 5, 1], [3, 6, 0, 8], [9, 4, 10, 11]][index]

    def part(self, token_ids: list[int], how: RowSampling = GREEDY, rows: tuple[int, ...] = (-1,)) -> SequencePart:
        start = self.length
        self.length += len(token_ids)
        pages = self.pages[: -(-self.length // 64)]
        return SequencePart(token_ids, start, pages, self.index, [(row, how) for row in rows])


def steps() -> Iterator[tuple[Phase, Step]]:
    """Chunked prefill, ragged steps, then decode of three sequences with draws of every kind."""
    a, b, c = (Sequence(i) for i in range(3))
    drawn = RowSampling(temperature=0.8, top_k=20, top_p=0.9, seed=(5, 7))
    penalised = RowSampling(repetition_penalty=1.3, frequency_penalty=0.2, sample_slot=1)
    yield "prefill", build_step([a.part(PROMPT[:48])])
    yield "prefill", build_step([a.part(PROMPT[48:78], rows=(0, -1)), b.part(PROMPT[:18], drawn)])
    yield "prefill", build_step([c.part(PROMPT[:40], penalised)])
    for i in range(4):
        every = zip((a, b, c), (GREEDY, drawn, penalised), strict=True)
        yield "decode", build_step([s.part(PROMPT[50 + i : 51 + i], how) for s, how in every])
    yield "decode", build_step([b.part(PROMPT[60:63], drawn, rows=(0, 1, 2)), a.part([5])])
    recorded = RowSampling(sample_slot=2, use_bias=True, use_mask=True)
    yield "decode", build_step([a.part([6], recorded), c.part([from_slot(1)], RowSampling(forced_token=8))])
    yield "decode", build_step([a.part([from_slot(2)], recorded)])


def check_equal(found: StepResult, expected: StepResult) -> None:
    for name in (*RESULT_ARRAYS, "logits"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)


def tensor(executor: Executor, state: str) -> torch.Tensor:
    """A state's content, after everything that was submitted."""
    if isinstance(executor, ReferenceExecutor):
        return executor.states[state].clone()
    assert isinstance(executor, GpuExecutor)
    executor._stream.wait()
    given = executor._states.inputs[state]
    shape = executor._states.shape(state, executor.pools)
    found: torch.Tensor = cuda._runtime().tensor(given.dtype, shape, executor._state_addresses[state])
    return found.clone()


# --- Results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
@pytest.mark.parametrize("kind", ["plugin-host", "tensorrt"])
def test_results_equal_the_reference_executors(
    kind: str,
    weights: str,
    request: pytest.FixtureRequest,
    fake: FakeCuda,
    plugins: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, with two steps in flight, and all states, too."""
    directory = request.getfixturevalue("directory" if weights == "nvfp4" else "bf16_directory")
    gpu_executor, reference = open_gpu(kind, directory, fake, plugins, monkeypatch), open_reference(directory)
    gpu_executor.poison()
    for one in (gpu_executor, reference):
        one.begin_sequence(1, [1, 2, 2, 3], generated=[9, 9])
        one.set_logit_bias(2, {400: 50.0, 401: 60.0})
        mask = np.full(one.config.vocab_size // 32, -1, np.int32)
        mask[401 // 32] ^= 1 << 401 % 32
        one.set_token_mask(2, mask)
    pending: list[tuple[Any, StepResult]] = []
    for phase, step in steps():
        expected = reference.run(phase, step, logits=True)
        pending.append((gpu_executor.submit(phase, step, logits=True), expected))
        if len(pending) == MAX_IN_FLIGHT:
            found, wanted = pending.pop(0)
            check_equal(found.result(), wanted)
    last = pending[0][0].result()
    check_equal(last, pending[0][1])
    assert last.tokens.tolist() == [400]  # by its bias; the mask forbids 401
    for name in gpu_executor._states.sampling():
        assert torch.equal(tensor(gpu_executor, name), tensor(reference, name)), name


def test_some_rows_of_the_logits(executor: Executor, directory: Path) -> None:
    """In memory that is used again, with two steps in flight."""
    other = open_reference(directory)
    pending: list[tuple[Any, Any]] = []
    for number, (phase, step) in enumerate(steps()):
        every = other.run(phase, step, logits=True).logits
        assert every is not None
        rows = list(range(len(every)))[number % 2 :: 1 + number % 3]
        pending.append((executor.submit(phase, step, logits=rows), every[rows] if rows else None))
        if len(pending) == MAX_IN_FLIGHT:
            found, wanted = pending.pop(0)
            np.testing.assert_array_equal(found.result().logits, wanted)
    np.testing.assert_array_equal(pending[0][0].result().logits, pending[0][1])
    if isinstance(executor, GpuExecutor):
        held = [len(memory.array) // (executor.config.vocab_size * 4) for memory in executor._free_logits]
        assert max(Counter(held).values()) <= MAX_IN_FLIGHT and max(held) <= 4
        executor.close()
        assert not executor._free_logits


def test_a_step_is_one_copy_each_way_and_no_wait(gpu_executor: GpuExecutor, fake: FakeCuda) -> None:
    fake.cudaStreamSynchronize(gpu_executor._stream.handle)
    for phase, step in steps():
        before = fake.uploads, fake.downloads, fake.waits
        pending = gpu_executor.submit(phase, step)
        assert (fake.uploads - before[0], fake.downloads - before[1], fake.waits - before[2]) == (1, 1, 0)
        assert not pending.done()
        pending.result()
        assert pending.done() and fake.waits == before[2] + 1


def test_a_result_waits_for_its_own_step_only(gpu_executor: GpuExecutor, fake: FakeCuda) -> None:
    plan = list(steps())
    first, second = (gpu_executor.submit(*plan[i]) for i in range(2))
    result = first.result()
    assert first.done() and not second.done() and fake.pending(gpu_executor._stream.handle)
    third = gpu_executor.submit(*plan[2])
    assert first.result() is result
    kept = result.tokens.copy()
    for pending in (third, second):  # in any order
        pending.result()
    np.testing.assert_array_equal(result.tokens, kept)


def test_at_most_two_steps_are_unread(executor: Executor) -> None:
    plan = list(steps())
    pending = [executor.submit(*plan[i]) for i in range(MAX_IN_FLIGHT)]
    with pytest.raises(StepError, match="2 steps are unread"):
        executor.submit(*plan[2])
    pending[1].result()
    executor.submit(*plan[2])
    with pytest.raises(StepError, match="2 steps are unread"):
        executor.submit(*plan[3])
    executor.close()


def test_discarded_steps_are_unread_no_more(executor: Executor) -> None:
    """They have run, and as many as ever may follow, also where somebody still reads a discarded one."""
    plan = list(steps())
    stale = [executor.submit(*plan[i]) for i in range(MAX_IN_FLIGHT)]
    executor.discard()
    executor.discard()
    following = [executor.submit(*plan[MAX_IN_FLIGHT])]
    for pending in stale:
        pending.result()
    following.append(executor.submit(*plan[MAX_IN_FLIGHT + 1]))
    with pytest.raises(StepError, match="2 steps are unread"):
        executor.submit(*plan[0])
    for pending in following:
        assert (pending.result().tokens >= 0).all()
    executor.close()


def test_discarding_says_that_a_device_is_lost(gpu_executor: GpuExecutor, fake: FakeCuda) -> None:
    gpu_executor.submit(*next(steps()))
    fake.fail_waits = True
    with pytest.raises(CudaError, match="cudaStreamSynchronize failed"):
        gpu_executor.discard()
    fake.fail_waits = False


def test_a_step_that_failed_says_so_each_time(gpu_executor: GpuExecutor, fake: FakeCuda) -> None:
    plan = list(steps())
    pending = gpu_executor.submit(*plan[0])
    fake.fail_waits = True
    for _ in range(2):
        with pytest.raises(CudaError, match="cudaEventSynchronize failed"):
            pending.result()
    fake.fail_waits = False
    gpu_executor.run(*plan[0])


def test_a_growing_sequence_keeps_its_bindings(gpu_executor: GpuExecutor) -> None:
    sequence = Sequence(0)
    for length in (0, 63, 64, 190):
        sequence.length = length
        gpu_executor.run("decode", build_step([sequence.part([1])]))
    assert len(gpu_executor._prepared) == 1


def test_hand_made_steps_run_like_built_ones(gpu_executor: GpuExecutor) -> None:
    _, step = next(steps())
    packed = gpu_executor.run("prefill", step, logits=True)
    by_hand = Step(**step.arrays())  # type: ignore[arg-type]
    assert by_hand.packed is None
    check_equal(gpu_executor.run("prefill", by_hand, logits=True), packed)


def test_a_malformed_step_takes_no_place(executor: Executor) -> None:
    bad = build_step([Sequence(0).part([1] * 9)])
    for _ in range(MAX_IN_FLIGHT + 1):
        with pytest.raises(StepError, match="at most 8 tokens"):
            executor.submit("decode", bad)
    executor.run("prefill", bad)


# --- States -------------------------------------------------------------------------------------------------------


def test_allocated_states_start_empty(executor: Executor) -> None:
    for _ in range(2):
        assert not tensor(executor, "token_counts").any()
        assert not tensor(executor, "logit_bias").any()
        assert (tensor(executor, "token_mask") == -1).all()
        executor.begin_sequence(0, [1, 2])
        executor.set_logit_bias(1, {3: 1.0})
        executor.set_token_mask(2, np.zeros(executor.config.vocab_size // 32, np.int32))
        executor.allocate(PAGES, SLOTS, SAMPLE_SLOTS)


def test_begin_sequence_resets_one_slot(executor: Executor) -> None:
    words = executor.config.vocab_size // 32
    for slot in range(SAMPLE_SLOTS):
        executor.begin_sequence(slot, [1, 2], generated=[3])
        executor.set_logit_bias(slot, {5: 2.0, 7: -np.inf})
        executor.set_token_mask(slot, np.arange(words, dtype=np.uint32))
    executor.begin_sequence(1, (tokens := [4, 4, 6]), generated=[6, 6, 8])
    tokens.clear()  # The executor has what it needs.
    counts, bias, mask = (tensor(executor, name) for name in ("token_counts", "logit_bias", "token_mask"))
    expected = torch.zeros_like(counts)
    expected[[0, 2], 1] = expected[[0, 2], 2] = expected[1, 4] = PROMPT_FLAG
    expected[[0, 2], 3] = expected[1, 8] = 1
    expected[1, 6] = PROMPT_FLAG + 2
    assert torch.equal(counts, expected)
    assert not bias[1].any() and (mask[1] == -1).all()
    assert bias[0, 5] == 2 and bias[2, 7] == -np.inf and bias[0].count_nonzero() == 2
    assert mask[0].tolist() == mask[2].tolist() == list(range(words))
    executor.begin_sequence(1, ())
    assert not tensor(executor, "token_counts")[1].any()


def test_a_bias_is_replaced_and_cleared(executor: Executor) -> None:
    executor.set_logit_bias(0, {1: 1.0})
    executor.set_logit_bias(0, {2: 3.0})
    assert tensor(executor, "logit_bias").nonzero().tolist() == [[0, 2]]
    executor.set_logit_bias(0, {})
    assert not tensor(executor, "logit_bias").any()


def test_states_change_in_the_steps_order(gpu_executor: GpuExecutor, reference: ReferenceExecutor) -> None:
    """What is set between two steps is seen by the second only, though neither has run by then."""
    how = RowSampling(repetition_penalty=5.0, sample_slot=0)
    results = []
    for one in (gpu_executor, reference):
        a, b = Sequence(0), Sequence(1)
        one.begin_sequence(0, ())
        pending = [one.submit("prefill", build_step([a.part(PROMPT[:40], how)]))]
        one.begin_sequence(0, range(one.config.vocab_size // 2))
        pending.append(one.submit("prefill", build_step([b.part(PROMPT[:40], how)])))
        results.append([int(p.result().tokens[0]) for p in pending])
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_many_uploads_keep_their_content(gpu_executor: GpuExecutor) -> None:
    """More than the ring holds: a later one never overwrites one that has not arrived."""
    count, words = 1000, gpu_executor.config.vocab_size // 32
    gpu_executor.allocate(PAGES, SLOTS, count)
    for slot in range(count):
        mask = np.full(words, slot, np.int32)
        gpu_executor.set_token_mask(slot, mask)
        mask[:] = -7
    expected = torch.arange(count, dtype=torch.int32)[:, None].expand(count, words)
    assert torch.equal(tensor(gpu_executor, "token_mask"), expected)


def test_copied_slots_continue_alike(executor: Executor) -> None:
    """K10: what a sequence left in its ring serves another; a copy stays as it was."""
    a, b = Sequence(0), Sequence(1)
    executor.run("prefill", build_step([a.part(PROMPT[:48])]))
    executor.copy_slots([0, 0], [1, 3])
    results = []
    for one in (a, b):
        one.length, one.pages = 48, Sequence(0).pages
        results.append(executor.run("decode", build_step([one.part([9])]), logits=True))
    check_equal(results[1], results[0])
    executor.run("prefill", build_step([Sequence(2).part(PROMPT[:48])]))  # which is in slot 2
    executor.copy_slots([2, 3], [0, 1])
    b.length = 48
    check_equal(executor.run("decode", build_step([b.part([9])]), logits=True), results[0])
    for layer in executor.config.sliding_layers:
        pool = tensor(executor, f"kv.{layer}")
        assert torch.equal(pool[2].view(torch.int16), pool[0].view(torch.int16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.begin_sequence(SAMPLE_SLOTS, [1]), "sample_slot must be from 0 to 2, found 3"),
        (lambda e: e.begin_sequence(0, [768]), "token ids must be from 0 to 767, found 768 to 768"),
        (lambda e: e.begin_sequence(0, [1], [-1]), "token ids must be from 0 to 767, found -1 to -1"),
        (lambda e: e.set_logit_bias(-1, {}), "sample_slot must be from 0 to 2, found -1"),
        (lambda e: e.set_logit_bias(0, {768: 1.0}), "token ids must be from 0 to 767"),
        (lambda e: e.set_token_mask(0, np.zeros(23, np.int32)), r"int32 or uint32 \[24\], found int32 \[23\]"),
        (lambda e: e.set_token_mask(0, np.zeros(24, bool)), r"int32 or uint32 \[24\], found bool \[24\]"),
        (lambda e: e.copy_slots([0, 1], [2]), "as many sources as targets, found 2 and 1"),
        (lambda e: e.copy_slots([0], [SLOTS]), "ring slots must be from 0 to 3, found 4"),
    ],
)
def test_refused(call: Callable[[Executor], None], message: str, executor: Executor) -> None:
    with pytest.raises(StepError, match=message):
        call(executor)


def test_memory_available_is_what_allocate_takes(gpu_executor: GpuExecutor, fake: FakeCuda) -> None:
    fake.total = fake.used + gpu_memory.HEADROOM_BYTES + (4 << 20)
    available = gpu_executor.memory_available()
    page = gpu_executor._states.row_bytes("kv.0")
    gpu_executor.allocate(available // page - 8, 1, 1)
    assert gpu_executor.memory_available() == available
    fake.total = 0
    gpu_executor._drop_states()
    assert gpu_executor.memory_available() == 0


def test_the_reference_executor_knows_no_limit(reference: ReferenceExecutor) -> None:
    assert reference.memory_available() is None


# --- Imports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["executors.plugin_host", "executors.tensorrt", "executors", "cli", "engine"])
def test_no_torch_on_the_gpu_path(module: str) -> None:
    """torch takes seconds to load, and a GPU machine may lack it."""
    code = f"import sys, flint_runtime.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_an_engine_runs_without_torch(directory: Path, plugins: Path) -> None:
    """Opening, allocating and submitting, too, import none."""
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from types import SimpleNamespace
from flint_plugins.library import library_info
from flint_runtime.executors import cuda, open_executor
from flint_plugins.library import ENVIRONMENT_VARIABLE
from flint_runtime.engine import Engine
from flint_runtime.executors.step import RowSampling, SequencePart, build_step
from tests.runtime.null_cuda import NullCuda
architecture = library_info(Path({str(plugins)!r})).architectures[0]
cuda._runtime = lambda: fake
fake = NullCuda(divmod(int(architecture[2:]), 10))
executor = open_executor(Engine.open(Path({str(directory)!r})), "plugin-host")
executor.allocate(4, 1, 1)
executor.begin_sequence(0, [1])
for graph in executor.graphs.values():
    graph.launch = lambda *_: "eager"
print(executor.run("decode", build_step([SequencePart([1], 0, [0], 0, [(-1, RowSampling())])])).tokens.shape)
"""
    environment = os.environ | {ENVIRONMENT_VARIABLE: str(plugins)}  # the engine has no library of its own
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert done.stdout == "(1,)\n", done.stderr
