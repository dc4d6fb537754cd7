"""Free parts of a grammar: the core runs ahead in them, and the tokens are those that it would have drawn without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flint_runtime.engine_core import EngineCore
from flint_runtime.free_parts import Mask, ThinkingPart, ThinkingRules, all_but, only
from flint_runtime.request import EngineRequest
from tests.runtime.cores import Collected, check_idle, request, run
from tests.runtime.fake_executor import expected_tokens
from tests.runtime.test_engine_core import Counting, open_core, prompt

TRIGGERS = frozenset(range(60, 64))
FREE = all_but((3, 5), 64)


class Switching(Counting):
    """Free but for two tokens; a trigger begins a part that rises to a multiple of 20, then it is free again."""

    def __init__(self, ahead: bool = True) -> None:
        super().__init__(0)
        self.ahead, self.inside = ahead, False
        self.drawn: list[int] = []

    @property
    def triggers(self) -> frozenset[int] | None:
        """See `Grammar`."""
        return TRIGGERS if self.ahead and not self.inside else None

    def mask(self, ahead: int = 0) -> Mask:
        """See `Grammar`."""
        return super().mask(ahead) if self.inside else FREE

    def accept(self, token_id: int) -> bool:
        """See `Grammar`."""
        self.drawn.append(token_id)
        if not self.inside:
            self.inside, self.last = token_id in TRIGGERS, token_id
            return token_id not in (3, 5)
        allowed = super().accept(token_id)
        self.inside = token_id % 20 != 0
        return allowed

    @property
    def finished(self) -> bool:
        """See `Grammar`."""
        return False


def switching(name: str, seed: int, ahead: bool, count: int = 120, **params: Any) -> EngineRequest:
    return request(
        name, prompt(20 + 13 * seed, seed), count, grammar=Switching(ahead), temperature=1.0, seed=seed, **params
    )


@pytest.mark.parametrize("pages", [10, 100])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
@pytest.mark.parametrize(
    "params", [{}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"min_tokens": 60, "logprobs": 2}]
)
def test_the_same_tokens_as_with_sitting_out(pages: int, num_speculative_tokens: int, params: dict[str, Any]) -> None:
    """Also where a discarded step meets a preemption; whoever is beside it has the tokens that it has alone."""
    found, free = {}, [request(f"f{i}", prompt(60, 50 + i), 90, temperature=1.0, seed=i) for i in range(2)]
    stops = (7,) if "min_tokens" in params else ()
    for ahead in (False, True):
        core, _ = open_core(pages=pages, max_model_len=600, snapshots=0, num_speculative_tokens=num_speculative_tokens)
        requests = [switching(f"g{i}", i, ahead, stop=stops, eos=stops, **params) for i in range(6)]
        found[ahead] = run(core, [*requests, *free])
        assert (core.stats().preemptions > 0) == (pages == 10)
        check_idle(core)
    for name in found[True].outputs:
        assert found[True].tokens(name) == found[False].tokens(name)
        assert found[True].last(name).finish_reason == found[False].last(name).finish_reason
    for bystander in free:
        assert found[True].tokens(bystander.request_id) == expected_tokens(bystander)


def test_no_step_is_sat_out_in_the_free_part() -> None:
    """A request alone: a decode step for every token, and one more for each that a trigger made void."""
    core, executor = open_core()
    one = switching("a", 1, True)
    drawn = run(core, [one]).tokens("a")
    grammar, dropped = Switching(), 0
    for token in drawn[:-1]:
        was_free = not grammar.inside
        grammar.accept(token)
        dropped += was_free and grammar.inside
    assert dropped > 1
    assert sum(phase == "decode" for phase, _ in executor.steps) == len(drawn) - 1 + dropped
    masks: list[int] = []
    core, executor = open_core()
    executor.set_token_mask = lambda sample_slot, mask: masks.append(sample_slot)  # type: ignore[method-assign]
    run(core, [request("b", prompt(9), 50, grammar=ThinkingPart(RULES, None, None))])
    assert len(masks) == 1, "the same mask is handed over once"


def test_the_step_after_next_is_submitted_before_the_last_is_read() -> None:
    """As without a grammar: the token of step n is read once step n + 1 has been submitted."""
    core, executor = open_core()
    core.add(request("a", prompt(9), 50, grammar=ThinkingPart(RULES, None, None)))
    core.step()
    for _ in range(20):
        core.step()
        assert len(executor.unread) == 1


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(rng=st.randoms(use_true_random=False), pages=st.integers(8, 14), sequences=st.integers(1, 5))
def test_aborts_at_any_step(rng: Any, pages: int, sequences: int) -> None:
    """What an aborted one has drawn is the beginning of what it draws alone; a bystander notices nothing."""
    core, _ = open_core(pages=pages, sequences=sequences, snapshots=2)
    bystander = request("f", prompt(70, 99), 100, temperature=1.0, seed=9)
    requests = [switching(f"g{i}", i, True, 60, presence_penalty=rng.choice([0.0, 0.5])) for i in range(4)]
    for one in [bystander, *requests]:
        core.add(one)
    found = Collected()
    while core.has_work():
        if rng.random() < 0.03:
            core.abort(rng.choice(requests).request_id)
        if rng.random() < 0.02:
            core._torn = True  # As after a change that was cut short.
        found.add(core.step())
    check_idle(core)
    assert found.tokens("f") == expected_tokens(bystander)
    for index, one in enumerate(requests):
        sitting = switching("x", index, False, 60, presence_penalty=one.params.presence_penalty)
        alone = run(open_core()[0], [sitting]).tokens("x")
        tokens = found.tokens(one.request_id)
        assert tokens == alone[: len(tokens)]


# --- thinking_token_budget --------------------------------------------------------------------------------------------

END = 63
RULES = ThinkingRules(END, all_but((), 64), only((END,), 64))


def thinking(core: EngineCore, budget: int | None, seed: int, **params: Any) -> list[int]:
    grammar = ThinkingPart(RULES, budget, None)
    one = request("a", prompt(30, seed), 40, grammar=grammar, temperature=1.0, seed=seed, **params)
    return run(core, [one]).tokens("a")


@pytest.mark.parametrize("budget", [0, 1, 2, 9, 38, 39])
@pytest.mark.parametrize("seed", range(6))
def test_the_thinking_part_ends_after_its_budget(budget: int, seed: int) -> None:
    """With the tokens that are drawn without, up to there; what ended before, goes on unharmed."""
    free = thinking(open_core()[0], None, seed)
    core, executor = open_core()
    tokens = thinking(core, budget, seed)
    assert len(tokens) == 40
    natural = free.index(END) if END in free else 40
    if natural <= budget:
        assert tokens == free
    else:
        assert tokens[: budget + 1] == [*free[:budget], END]
    assert sum(phase == "decode" for phase, _ in executor.steps) <= 40


def test_a_budget_with_stops_and_penalties() -> None:
    for seed in range(5):
        tokens = thinking(open_core()[0], 5, seed, presence_penalty=0.5, logit_bias={END: -100.0})
        assert tokens.index(END) == 5 and np.count_nonzero(np.array(tokens) == END) == 1
