"""The budget of a prefill step against made-up devices."""

from __future__ import annotations

import pytest

from flint_runtime.prefill_budget import PrefillBudget

TARGET = 0.04


def h200(start: int, tokens: int) -> float:
    """Seconds of a prefill step, about as measured on an H200: 29 ms for 512 tokens, 131 ms for 8,192 at no context."""
    return 0.022 + 13e-6 * tokens * (1 + (start + tokens / 2) / 24_000)


def slow(start: int, tokens: int) -> float:
    """A device that takes no time to start, but long for every token, whatever the context."""
    return 200e-6 * tokens


@pytest.mark.parametrize("device", [h200, slow])
@pytest.mark.parametrize("first", [[512], [8192], [40, 90, 17], [8192, 8192, 100]])
def test_a_long_prompt_keeps_the_pace(device: object, first: list[int]) -> None:
    """From 0 to 100,000 tokens of context, whatever was measured before: at most two steps are too long."""
    assert callable(device)
    budget = PrefillBudget(TARGET)
    for tokens in first:
        budget.record(budget.work(0, tokens), device(0, tokens))
    start, durations = 0, []
    while start < 100_000:
        tokens = min(8192, budget.tokens(start))
        durations.append(device(start, tokens))
        budget.record(budget.work(start, tokens), durations[-1])
        start += tokens
    assert sum(seconds > 0.05 for seconds in durations) <= 2
    assert max(durations) < 0.35 if device is slow else max(durations) < 0.06
    # Nor are the steps much shorter than they may be: a prompt would take for ever.
    assert sum(durations[10:]) / len(durations[10:]) > 0.03


def test_one_wrong_measurement_is_forgotten() -> None:
    budget = PrefillBudget(TARGET)
    for _ in range(10):
        budget.record(budget.work(0, 1000), h200(0, 1000))
    good = budget.tokens(0)
    budget.record(budget.work(0, 1000), 1.0)
    assert budget.tokens(0) < good / 2
    for _ in range(20):
        tokens = budget.tokens(0)
        budget.record(budget.work(0, tokens), h200(0, tokens))
    assert budget.tokens(0) == pytest.approx(good, rel=0.3)


def test_at_least_a_page() -> None:
    budget = PrefillBudget(1e-9)
    budget.record(budget.work(0, 100), 1.0)
    assert budget.tokens(250_000) == 64


@pytest.mark.parametrize("start", [0, 17, 8192, 262_144])
def test_tokens_of_the_work_of_tokens(start: int) -> None:
    for tokens in (1, 63, 64, 1000, 8192):
        work = PrefillBudget.work(start, tokens)
        assert PrefillBudget.tokens_of(work, start) == tokens
        assert PrefillBudget.tokens_of(work - 0.01, start) == tokens - 1
