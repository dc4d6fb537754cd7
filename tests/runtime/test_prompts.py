"""Prompts: every form that vLLM takes, and nothing else."""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from flint_runtime.errors import UsageError
from flint_runtime.prompts import split_prompt, split_prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ("text", None)),
        ([1, 2], (None, [1, 2])),
        ((1, 2), (None, [1, 2])),
        (range(3), (None, [0, 1, 2])),
        (np.array([1, 2]), (None, [1, 2])),
        ([np.int64(1), 2], (None, [1, 2])),
        ({"prompt": "text"}, ("text", None)),
        ({"prompt_token_ids": [1, 2]}, (None, [1, 2])),
        ({"prompt": "text", "prompt_token_ids": (1, 2)}, ("text", [1, 2])),
        ({"prompt": "text", "multi_modal_data": None}, ("text", None)),
        (MappingProxyType({"prompt": "text"}), ("text", None)),
    ],
)
def test_one_prompt(prompt: Any, expected: tuple[str | None, list[int] | None]) -> None:
    found = split_prompt(prompt)
    assert found == expected
    assert found[1] is None or all(type(token) is int for token in found[1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "must be a text"),
        (5, "must be a text"),
        (b"hi", "must be a text"),
        (bytearray(b"hi"), "must be a text"),
        (memoryview(b"hi"), "must be a text"),
        ({1, 2}, "must be a text"),
        (object(), "must be a text"),
        (iter([1, 2]), "must be a text"),
        (np.int64(5), "must be a text"),
        (np.array(5), "must be a text"),
        ("\ud800", "surrogate pair"),
        ("a\udcff", "surrogate pair.*character 1"),
        ([1.0], "whole numbers, found 1.0 at 0"),
        ([1, True], "found True at 1"),
        ([1, None], "found None at 1"),
        (["a"], "found 'a' at 0"),
        ([[1]], "whole numbers"),
        (np.array([0.5]), "whole numbers"),
        (np.array([[1, 2]]), "whole numbers"),
        ({}, "must be a text"),
        ({"prompt": None}, "must be a text"),
        ({"prompt": 5}, "prompt must be a text"),
        ({"prompt": "\ud800"}, "surrogate pair"),
        ({"prompt_token_ids": "12"}, "token ids"),
        ({"prompt_token_ids": b"12"}, "token ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "found 'multi_modal_data'"),
        ({"prompt": "a", "cache_salt": "x"}, "found 'cache_salt'"),
        ({"text": "a"}, "found 'text'"),
    ],
)
def test_what_is_no_prompt(prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_prompt(prompt)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one", 1), ([1, 2], 1), (np.array([1, 2]), 1), ({"prompt": "one"}, 1), ([], 0), ((), 0), (["a", "b"], 2),
        ([[1], [2]], 2), (np.array([[1, 2], [3, 4]]), 2), (["a", [1], {"prompt": "b"}], 3), (range(3), 1),
        (deque(["a", "b"]), 2), ([np.int64(3)], 1),
    ],
)  # fmt: skip
def test_one_or_many(prompts: Any, count: int) -> None:
    found = split_prompts(prompts)
    assert len(found) == count
    for prompt in found:
        split_prompt(prompt)


@pytest.mark.parametrize("prompts", [None, 5, b"hi", object(), {"a", "b"}, iter(["a"]), np.array(5), True])
def test_what_is_neither(prompts: Any) -> None:
    with pytest.raises(UsageError, match="prompts must be"):
        split_prompts(prompts)


@pytest.mark.parametrize("prompts", [[True], [1, "a"], ["a", 1], [None], [b"hi"], [[1], 2], [1.5]])
def test_lists_of_what_is_no_prompt(prompts: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        for prompt in split_prompts(prompts):
            split_prompt(prompt)
