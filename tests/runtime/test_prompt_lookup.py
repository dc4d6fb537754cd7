"""Prompt lookup against a plain search of the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime import prompt_lookup
from flint_runtime.prompt_lookup import PromptLookup


def search(tokens: list[int], most: int) -> list[int]:
    """What follows the latest earlier occurrence of the longest known ending of 4, 3 or 2 tokens."""
    for n in (4, 3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                grown = list(tokens)
                for i in range(most):
                    grown.append(grown[end + i])
                return grown[len(tokens) :]
    return []


def propose(tokens: list[int], most: int) -> list[int]:
    return PromptLookup(tokens).propose(most)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 7), st.integers(0, 40))
@settings(max_examples=500, deadline=None)
def test_as_a_plain_search(tokens: list[int], most: int, at_once: int) -> None:
    """However the tokens come: a prompt at once, then one by one."""
    lookup = PromptLookup(tokens[:at_once])
    for token in tokens[at_once:]:
        lookup.extend([token])
    assert lookup.propose(most) == search(tokens, most) == propose(tokens, most)


def test_examples() -> None:
    assert propose([], 4) == propose([1, 2, 3], 4) == propose([1, 2], 4) == []
    assert propose([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert propose([9, 7, 7, 7], 5) == [7] * 5
    assert propose([1, 2, 8, 1, 2, 9, 1, 2], 1) == [9]  # the latest occurrence
    assert propose([3, 1, 2, 8, 5, 1, 2, 9, 3, 1, 2], 1) == [8]  # the longer match


def test_a_token_costs_the_same_in_a_long_text() -> None:
    """100,000 tokens come one by one in far less time than one search of the text per token takes (minutes)."""
    lookup, started = PromptLookup(range(50_000)), time.monotonic()
    for token in range(50_000):
        lookup.extend([token])
        lookup.propose(4)
    assert time.monotonic() - started < 5


def test_of_a_long_prompt_the_end_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_MOST_TOKENS", 6)
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 9, 4, 5])
    assert lookup.propose(2) == [9, 9]
    lookup.extend([1, 2])
    assert lookup.propose(1) == [], "what followed 1, 2 is not indexed"
