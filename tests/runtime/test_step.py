"""Building steps, and what an executor refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime.executors import step as step_module
from flint_runtime.executors.step import (
    Pools,
    RowSampling,
    SequencePart,
    Step,
    StepChecker,
    StepError,
    build_step,
    check_step,
    from_slot,
)
from flint_runtime.manifest import PHASES, Limits, Phase
from tests.shapes import NANO

LIMITS = Limits(max_batch=3, max_context=200, prefill_chunk=64)
POOLS = Pools(pages=8, slots=3, sample_slots=2)
GREEDY = RowSampling()


def two_parts() -> list[SequencePart]:
    """A sequence with three new tokens at 62, and one with two at 0."""
    return [
        SequencePart(
            [4, 5, 6], 62, [3, 1], 2, [(0, GREEDY), (-1, RowSampling(0.5, 9, seed=(2**32 - 1, 7), draw_index=4))]
        ),
        SequencePart([7, 8], 0, [5], 0, [(-1, RowSampling(sample_slot=1))]),
    ]


def test_build_step() -> None:
    step = build_step(two_parts())
    assert step.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert step.positions.tolist() == [62, 63, 64, 0, 1]
    assert step.query_start.tolist() == [0, 3, 5]
    assert step.seq_lens.tolist() == [65, 2]
    assert step.page_table.tolist() == [[3, 1], [5, 0]]
    assert step.ring_slot.tolist() == [2, 0]
    assert step.logits_rows.tolist() == [0, 2, 4]
    assert step.temperature.tolist() == [0.0, 0.5, 0.0]
    assert step.top_k.tolist() == [0, 9, 0]
    assert step.seed.tolist() == [[0, 0], [-1, 7], [0, 0]]
    assert step.draw_index.tolist() == [0, 4, 0]
    assert step.sample_slot.tolist() == [-1, -1, 1]
    assert step.forced_token.tolist() == [-1, -1, -1]
    assert step.sample_flags.tolist() == [0, 0, 0]
    for phase in PHASES:
        check_step(step, phase, NANO, LIMITS, POOLS)
    table = np.array([[3, 1, 9], [5, 9, 9]], np.int32)
    assert build_step(two_parts(), table).page_table is table


def test_bias_mask_and_forced_tokens() -> None:
    rows = [
        RowSampling(forced_token=767),
        RowSampling(sample_slot=0, use_bias=True),
        RowSampling(sample_slot=1, use_mask=True),
        RowSampling(sample_slot=1, use_bias=True, use_mask=True),
    ]
    step = build_step([SequencePart([1, 2, 3, 4], 0, [0], 0, list(enumerate(rows)))])
    assert step.forced_token.tolist() == [767, -1, -1, -1]
    assert step.sample_flags.tolist() == [0, 1, 2, 3]
    check_step(step, "prefill", NANO, LIMITS, POOLS)


def test_tokens_of_a_slot() -> None:
    assert [from_slot(slot) for slot in (0, 1)] == [-1, -2]
    step = build_step([SequencePart([from_slot(1)], 9, [0], 0, [(0, GREEDY)])])
    assert step.token_ids.tolist() == [-2]
    check_step(step, "decode", NANO, LIMITS, POOLS)


def test_padding_is_accepted() -> None:
    """Rows behind query_start[B], and sequences without tokens, whose places are not looked at."""
    step = build_step([*two_parts(), SequencePart([], 0, [], 99)])
    padded = replace(
        step,
        token_ids=np.append(step.token_ids, 0).astype(np.int32),
        positions=np.append(step.positions, 0).astype(np.int32),
    )
    check_step(padded, "decode", NANO, LIMITS, POOLS)


def changed(**arrays: Any) -> Any:
    """The step of `two_parts` with some arrays replaced."""
    values: dict[str, Any] = {n: np.array(a, np.int32) for n, a in arrays.items()}
    return replace(build_step(two_parts()), **values)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (changed(token_ids=[4, 5, 6, 7, 768]), "token_ids must be from -2 to 767"),
        (changed(token_ids=[4, 5, from_slot(2), 7, 8]), "token_ids must be from -2 to 767, found -3 to 8"),
        (changed(token_ids=[4, 5, 6, 7]), "positions has T = 5, expected 4"),
        (changed(positions=[61, 62, 63, 0, 1]), "positions"),
        (changed(query_start=[0, 3, 6]), "query_start"),
        (changed(query_start=[1, 3, 5]), "query_start"),
        (changed(seq_lens=[65, 1]), "seq_lens"),
        (changed(seq_lens=[265, 2]), "seq_lens must be from 0 to 200"),
        (changed(page_table=[[3], [5]]), "2 pages are needed, the page table has 1 columns"),
        (changed(page_table=[[3, 8], [5, 0]]), "page_table must be from 0 to 7, found 3 to 8"),
        (changed(ring_slot=[3, 0]), "ring_slot must be from 0 to 2"),
        (changed(ring_slot=[1, 1]), "share a ring slot"),
        (changed(logits_rows=[0, 2, 5]), "logits_rows"),
        (changed(sample_slot=[0, 0, 2]), "sample_slot must be from -1 to 1"),
        (changed(forced_token=[-2, 0, 0]), "forced_token must be from -1 to 767"),
        (changed(forced_token=[-1, 768, 0]), "forced_token must be from -1 to 767"),
        (changed(sample_flags=[0, 0, 4]), "sample_flags must be from 0 to 3"),
        (changed(sample_flags=[0, 2, 0]), "a bias or a mask needs a sample_slot"),
        (changed(temperature=[0, 0, 0]), "temperature must be float32"),
        (build_step([SequencePart([1], 0, [0], 0)]), "a row of logits"),
        (build_step([SequencePart([1] * 65, 0, [0, 1], 0, [(0, GREEDY)])]), "at most 64 tokens, found 65"),
        (build_step([SequencePart([1], 0, [i], i, [(0, GREEDY)]) for i in range(4)]), "at most 3 sequences"),
    ],
)
def test_refused(step: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        check_step(step, "prefill", NANO, LIMITS, POOLS)


def test_a_number_beyond_32_bits_is_refused() -> None:
    with pytest.raises(StepError, match="does not fit 32 bits"):
        build_step([SequencePart([2**31], 0, [0], 0, [(0, GREEDY)])])
    with pytest.raises(StepError, match="does not fit 32 bits"):
        build_step([SequencePart([1], 0, [0], 0, [(0, RowSampling(temperature=1e300))])])


def test_built_arrays_cannot_be_written_to() -> None:
    """What was sound when it was built still is."""
    step = build_step(two_parts())
    for name, array in step.arrays().items():
        assert not array.flags.writeable, name
    assert replace(step, seq_lens=step.seq_lens).packed is None


def test_packed_words_are_those_of_the_arrays() -> None:
    step = build_step(two_parts())
    assert step.packed
    np.testing.assert_array_equal(Step(**step.arrays()).words(), step.packed.words)  # type: ignore[arg-type]


# --- The cheap check ----------------------------------------------------------------------------------------------


def numbers(low: int, high: int) -> st.SearchStrategy[int]:
    """Mostly right, sometimes one too low or too high."""
    return st.integers(low, high) | st.sampled_from([low - 1, low, high, high + 1])


@st.composite
def any_parts(draw: st.DrawFn) -> list[SequencePart]:
    """Parts that may be wrong in every way that a part can be."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        token_ids = draw(st.lists(numbers(-POOLS.sample_slots, NANO.vocab_size - 1), max_size=9))
        rows = []
        for index in range(len(token_ids)):
            if draw(st.booleans()):
                slot = draw(numbers(-1, POOLS.sample_slots - 1))
                forced = draw(numbers(-1, NANO.vocab_size - 1))
                flags = draw(st.booleans()), draw(st.booleans())
                rows.append(
                    (index, RowSampling(sample_slot=slot, forced_token=forced, use_bias=flags[0], use_mask=flags[1]))
                )
        start = draw(st.sampled_from([0, 3, 60, 192]))
        pages = draw(st.lists(numbers(0, POOLS.pages - 1), min_size=1, max_size=4))
        parts.append(SequencePart(token_ids, start, pages, draw(numbers(0, POOLS.slots - 1)), rows))
    return parts


@settings(deadline=None, max_examples=300)
@given(any_parts(), st.sampled_from(PHASES))
def test_the_cheap_check_refuses_what_the_full_one_does(parts: list[SequencePart], phase: Phase) -> None:
    step = build_step(parts)
    outcomes = []
    for check in (
        lambda: check_step(step, phase, NANO, LIMITS, POOLS),
        lambda: StepChecker(NANO, LIMITS, POOLS).check(step, phase),
    ):
        try:
            check()
            outcomes.append("")
        except StepError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_an_ordinary_step_needs_no_full_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise AssertionError

    checker = StepChecker(NANO, LIMITS, POOLS)
    monkeypatch.setattr(step_module, "check_step", full)
    for phase in PHASES:
        checker.check(build_step(two_parts()), phase)


def test_no_pools_take_no_step() -> None:
    checker = StepChecker(NANO, LIMITS, Pools(0, 0, 0))
    with pytest.raises(StepError, match="ring_slot must be from 0 to -1"):
        checker.check(build_step(two_parts()[:1]), "decode")


def test_decode_takes_few_tokens_of_a_sequence() -> None:
    nine = build_step([SequencePart([1] * 9, 0, [0], 0, [(0, GREEDY)])])
    check_step(nine, "prefill", NANO, LIMITS, POOLS)
    with pytest.raises(StepError, match="at most 8 tokens"):
        check_step(nine, "decode", NANO, LIMITS, POOLS)
    with pytest.raises(StepError, match="at most 8 tokens of a sequence"):
        check_step(nine, "decode", NANO, LIMITS.model_copy(update={"max_batch": 16}), POOLS)
