"""Steps in flight on a GPU: flint-nano with the next step submitted before the last one's tokens are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from flint_plugins.library import find_library
from flint_runtime.engine import Engine
from flint_runtime.executors.base import MAX_IN_FLIGHT, Pending
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.step import RowSampling, SequencePart, build_step, from_slot
from tests.gpu.engines import MAX_BATCH, nano_engine, nano_prompts

pytestmark = pytest.mark.gpu

LENGTH = 100
"""Of every prompt."""
NEW_TOKENS = 40
SLOTS = MAX_BATCH + 2


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, device_architecture: str) -> Iterator[PluginHostExecutor]:
    directory = nano_engine("nvfp4", device_architecture, tmp_path_factory.mktemp("engines"))
    executor = PluginHostExecutor(Engine.open(directory), find_library())
    executor.allocate(pages=8 * MAX_BATCH, slots=SLOTS, sample_slots=MAX_BATCH)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found = [prompt[:LENGTH] for prompt in nano_prompts() if len(prompt) >= LENGTH][:MAX_BATCH]
    assert len(found) == MAX_BATCH
    return found


def part(index: int, token_ids: list[int], start: int, how: RowSampling, ring_slot: int | None = None) -> SequencePart:
    """Sequence `index` of at most 512 tokens, whose pages and slots follow from its number."""
    pages = range(8 * index, 8 * index + -(-(start + len(token_ids)) // 64))
    return SequencePart(token_ids, start, pages, index if ring_slot is None else ring_slot, [(-1, how)])


def draw(index: int, count: int) -> RowSampling:
    return RowSampling(temperature=1.0, top_k=20, seed=(index, 5), draw_index=count, sample_slot=index)


def prefill(host: PluginHostExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """The first token of each sequence."""
    first = []
    for index, prompt in enumerate(prompts):
        host.begin_sequence(index, prompt)
        result = host.run("prefill", build_step([part(index, prompt, 0, draw(index, 0))]))
        first.append([int(result.tokens[0])])
    return first


def test_pipelined_decode_draws_the_same_tokens(host: PluginHostExecutor, prompts: list[list[int]]) -> None:
    host.poison()
    one_by_one = prefill(host, prompts)
    for count in range(1, NEW_TOKENS):
        parts = [
            part(i, tokens[-1:], len(prompts[i]) + count - 1, draw(i, count)) for i, tokens in enumerate(one_by_one)
        ]
        for tokens, token in zip(one_by_one, host.run("decode", build_step(parts)).tokens, strict=True):
            tokens.append(int(token))

    host.poison()
    pipelined = prefill(host, prompts)
    pending: deque[Pending] = deque()

    def read() -> None:
        for tokens, token in zip(pipelined, pending.popleft().result().tokens, strict=True):
            tokens.append(int(token))

    for count in range(1, NEW_TOKENS):
        parts = [part(i, [from_slot(i)], len(prompts[i]) + count - 1, draw(i, count)) for i in range(len(prompts))]
        if len(pending) == MAX_IN_FLIGHT:
            read()
        pending.append(host.submit("decode", build_step(parts)))
    while pending:
        read()
    assert pipelined == one_by_one


def test_a_copied_slot_continues_with_the_same_bits(host: PluginHostExecutor, prompts: list[list[int]]) -> None:
    """K10: the sliding state restored from a snapshot, also after its own slot went on."""
    host.poison()
    prefill(host, prompts[:1])
    snapshot, other = SLOTS - 1, SLOTS - 2
    host.copy_slots([0], [snapshot])
    step = build_step([part(0, [9], LENGTH, RowSampling())])
    expected = host.run("decode", step, logits=True)
    for position in range(LENGTH + 1, LENGTH + 40):
        host.run("decode", build_step([part(0, [7], position, RowSampling())]))
    host.copy_slots([snapshot], [other])
    found = host.run("decode", build_step([part(0, [9], LENGTH, RowSampling(), other)]), logits=True)
    assert found.logits is not None and expected.logits is not None
    assert found.logits.tobytes() == expected.logits.tobytes()


def test_bias_and_mask_take_their_turn(host: PluginHostExecutor, prompts: list[list[int]]) -> None:
    """Each of two steps in flight sees what was set before it, and a reset slot has neither."""
    prefill(host, prompts[:1])
    how = RowSampling(sample_slot=0, use_bias=True, use_mask=True)
    only = np.zeros(host.config.vocab_size // 32, np.int32)
    only[3] = 1 << 4
    step = build_step([part(0, [9], LENGTH, how)])
    host.set_logit_bias(0, {5: 1e4})
    first = host.submit("decode", step)
    host.set_token_mask(0, only)
    second = host.submit("decode", step)
    assert first.result().tokens.tolist() == [5]
    host.begin_sequence(0, ())
    third = host.submit("decode", step)
    assert second.result().tokens.tolist() == [3 * 32 + 4]
    plain = host.run("decode", build_step([part(0, [9], LENGTH, RowSampling())]))
    assert third.result().tokens.tolist() == plain.tokens.tolist()


def test_a_submitted_step_is_not_waited_for(host: PluginHostExecutor, prompts: list[list[int]]) -> None:
    """Results come in any order, and the first is there before the second has run or been read."""
    host.run("prefill", build_step([part(0, prompts[0], 0, RowSampling())]))
    pending = [host.submit("decode", build_step([part(0, [9], LENGTH, RowSampling())])) for _ in range(MAX_IN_FLIGHT)]
    later, earlier = pending[1].result(), pending[0].result()
    assert all(p.done() for p in pending)
    assert later.logprobs.tobytes() == earlier.logprobs.tobytes()
