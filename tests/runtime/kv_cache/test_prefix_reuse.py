"""How much of a prompt is computed, with the released model's window: what prefix caching saves at common lengths."""

from __future__ import annotations

import random

import pytest

from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.manifest import Limits
from tests.runtime.cores import Collected, check_idle, request, run
from tests.runtime.fake_executor import FAKE, FakeExecutor, expected_tokens

WINDOW_513 = FAKE.model_copy(update={"sliding_window": 513, "max_position_embeddings": 16_384})
LIMITS = Limits(max_batch=16, max_context=16_384, prefill_chunk=8192)


def open_core() -> EngineCore:
    """A core with room for everything."""
    return EngineCore(FakeExecutor(LIMITS, WINDOW_513), CoreConfig(kv_cache_memory_bytes=1 << 28))


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(64), k=length)


class Served:
    """Requests to one core, one after the other or together, whose tokens are checked."""

    def __init__(self) -> None:
        self.core = open_core()
        self.count = 0
        self.expected: dict[tuple[int, ...], list[int]] = {}
        """By prompt and number of tokens."""

    def together(self, prompts: list[list[int]], max_tokens: int = 5) -> tuple[int, Collected]:
        """Run prompts that come at once: prompt tokens that prefill steps computed, and the outputs."""
        before = self.core.stats().prompt_tokens_computed
        requests = [request(str(self.count + i), prompt, max_tokens) for i, prompt in enumerate(prompts)]
        self.count += len(requests)
        found = run(self.core, requests)
        for one in requests:
            key = (*one.prompt, max_tokens)
            if key not in self.expected:
                self.expected[key] = expected_tokens(one, WINDOW_513)
            assert found.tokens(one.request_id) == self.expected[key]
        check_idle(self.core)
        return self.core.stats().prompt_tokens_computed - before, found

    def computed(self, prompt: list[int], max_tokens: int = 5) -> int:
        """Tokens of one prompt that a prefill step computed."""
        return self.together([prompt], max_tokens)[0]


@pytest.mark.parametrize(
    ("head", "tail", "computed"),
    [
        (64, 30, [94, 30, 30, 30]),
        (200, 40, [240, 48, 48, 48]),
        (500, 80, [580, 132, 132, 132]),
        # The first one's ring has lost the head by its end. The second one is cut where they part.
        (700, 100, [800, 800, 160, 160]),
        (1000, 100, [1100, 1100, 140, 140]),
        (1000, 3000, [4000, 4000, 3040, 3040]),
        (5000, 100, [5100, 5100, 108, 108]),
        # A cut costs as much as is lost in three requests.
        (200, 700, [900, 900, 900, 900, 708, 708]),
        (64, 700, [764] * 9 + [700, 700]),
    ],
)
def test_a_common_head_with_different_tails(head: int, tail: int, computed: list[int]) -> None:
    served, begin = Served(), text(head, 0)
    assert [served.computed([*begin, *text(tail, 1 + i)]) for i in range(len(computed))] == computed


@pytest.mark.parametrize("length", [65, 240, 592, 593, 740, 1000, 2000, 8000])
def test_the_same_prompt_again(length: int) -> None:
    served, rest = Served(), (length - 1) % 64 + 1
    # All but the last page; a single token is decoded. The answers overwrite the ring's state at the prompt's end.
    again = rest if rest > 1 else 0
    assert [served.computed(text(length, 0), 90) for _ in range(3)] == [length, again, again]


@pytest.mark.parametrize("drop_thinking", [False, True])
def test_a_conversation(drop_thinking: bool) -> None:
    """A turn is computed from the last page boundary before it departs from the turn before: at the end of its answer,
    or at the end of its prompt where the template drops what was thought."""
    served, history = Served(), text(300, 0)
    parted = 0
    for turn in range(5):
        computed, found = served.together([history], 100)
        answer = found.tokens(str(turn))
        assert computed == len(history) - parted // 64 * 64
        # The last token of the answer was drawn, but its K and V not computed.
        parted = len(history) if drop_thinking else len(history) + 99
        history = [*history, *answer[50 if drop_thinking else 0 :], *text(60, 1 + turn)]


@pytest.mark.parametrize(
    ("count", "head", "tail", "computed"),
    [
        (2, 1000, 100, 2 * 1100),  # Not worth a step and a cut.
        (3, 1000, 100, 1100 + 2 * 140),
        (8, 1000, 100, 1100 + 7 * 140),
        (8, 300, 40, 340 + 7 * 84),
        (8, 100, 40, 8 * 140),
        (6, 740, 0, 740 + 5 * 36),
        (40, 1000, 100, 1100 + 39 * 140),  # More than have a place.
    ],
)
def test_prompts_that_come_together(count: int, head: int, tail: int, computed: int) -> None:
    begin = text(head, 0)
    assert Served().together([[*begin, *text(tail, 1 + i)] for i in range(count)])[0] == computed


def test_two_heads_in_turn_and_prompts_like_no_other() -> None:
    """What is used stays, however many snapshots are never used again."""
    served, heads, cached = Served(), [text(700, 0), text(200, 1)], []
    snapshots = served.core.stats().snapshots
    for i in range(2 * snapshots):
        served.computed(text(100, 1000 + i), 1)
        cached.append(len(prompt := [*heads[i % 2], *text(150, 2000 + i)]) - served.computed(prompt, 1))
    assert served.core.stats().snapshots_used == snapshots
    assert cached[:4] == [0, 0, 0, 192] and set(cached[4:]) == {640, 192}
