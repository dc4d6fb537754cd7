"""How many prompt tokens a step may take without stalling the streams that are running."""

from __future__ import annotations

from flint_plugins.ops import PAGE_TOKENS

_DOUBLING_TOKENS = 24_000
"""Context at which a token costs twice what it costs at none. From the measured prefill of the released model on an
H200: 8,192 tokens in 131 ms, 100,000 in 4.4 s. It only matters where one prompt follows another: within a prompt the
cost of the chunk before tells."""
_FIRST_COST = 25e-6
"""Seconds a token, before anything is measured."""
_SMALL_TOKENS = 512
"""A step of so many tokens counts half as much for the cost of a token as a very long one."""


class PrefillBudget:
    """Predicts a prefill step's duration as floor + cost * work; both are measured as it goes.

    work is the number of tokens, each weighted by its context. floor is what a step takes however few tokens it has:
    most experts' weights are read for a hundred tokens already.
    """

    def __init__(self, target_seconds: float) -> None:
        """
        Args:
            target_seconds: how long a prefill step may take while streams are running.
        """
        self._target = target_seconds
        self._floor: float | None = None
        self._cost = _FIRST_COST

    @staticmethod
    def work(start: int, tokens: int) -> float:
        """Of the tokens of one sequence from position `start` on."""
        return tokens * (1 + (start + tokens / 2) / _DOUBLING_TOKENS)

    def tokens(self, start: int) -> int:
        """How many tokens of a sequence at position `start` take the target time; at least a page's."""
        # Never less than a tenth for the tokens: a floor that was measured too high must not stop the prompts.
        seconds = max(self._target - (self._floor or 0.0), self._target / 10)
        return max(PAGE_TOKENS, int(seconds / self._cost / (1 + start / _DOUBLING_TOKENS)))

    def record(self, work: float, seconds: float) -> None:
        """A step of so much work took so long."""
        # The shortest step seen is the floor at most. It creeps up, so that one wrong measurement is forgotten.
        floor = seconds if self._floor is None else min(self._floor * 1.01, seconds)
        if self._floor is None:  # One measurement cannot tell floor from cost: half each.
            floor = seconds / 2
        self._floor = floor
        weight = work / (work + _SMALL_TOKENS) / 2
        self._cost += weight * ((seconds - floor) / work - self._cost)
        self._cost = max(self._cost, 1e-9)
