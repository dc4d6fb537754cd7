"""How many prompt tokens a step may take without stalling the streams that are running."""

from __future__ import annotations

import math

from flint_plugins.ops import PAGE_TOKENS

_DOUBLING_TOKENS = 24_000
"""Context at which a token costs twice what it costs at none. From the measured prefill of the released model on an
H200: 8,192 tokens in 131 ms, 100,000 in 4.4 s. It matters where a prompt with a long context follows one without."""
_FIRST_TOKENS = 512


class PrefillBudget:
    """Work that takes the target time, found by scaling what was measured.

    Work is the number of tokens, each weighted by its context. A step has a part that does not depend on it (the
    weights are read for a hundred tokens already), so scaling by target / duration never leads past the target.
    """

    def __init__(self, target_seconds: float) -> None:
        """
        Args:
            target_seconds: how long a prefill step may take while streams are running.
        """
        self._target = target_seconds
        self._work = float(_FIRST_TOKENS)

    @staticmethod
    def work(start: int, tokens: int) -> float:
        """Of the tokens of one sequence from position `start` on."""
        return tokens * (1 + (start + tokens / 2) / _DOUBLING_TOKENS)

    @staticmethod
    def tokens_of(work: float, start: int) -> int:
        """How many tokens of a sequence from position `start` on are at most so much work."""
        weight = 1 + start / _DOUBLING_TOKENS
        root = math.sqrt(weight * weight + 2 * work / _DOUBLING_TOKENS)
        return int(_DOUBLING_TOKENS * (root - weight) + 1e-6)  # Of the work of n tokens, n, however it was rounded.

    def tokens(self, start: int) -> int:
        """How many tokens of a sequence from position `start` on take the target time; at least a page's."""
        return max(PAGE_TOKENS, self.tokens_of(self._work, start))

    def record(self, work: float, seconds: float) -> None:
        """A step of so much work took so long."""
        if seconds > self._target:
            self._work = min(self._work, work * self._target / seconds)
        elif 2 * work >= self._work:  # A step that was short for want of tokens tells nothing about longer ones.
            self._work = max(self._work, work * min(self._target / max(seconds, 1e-9), 2.0))
