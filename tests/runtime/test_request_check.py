"""What a core takes: everything that a step would pack fits this engine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flint_runtime.errors import UsageError, shown
from flint_runtime.request import EngineRequest
from flint_runtime.request_check import check_request
from tests.runtime.cores import request

HUGE = 10**5000


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def check(one: EngineRequest) -> None:
    check_request(one, vocab_size=64, max_model_len=100)


def good(**params: Any) -> EngineRequest:
    return request("a", [1, 2, 63], 97, stop=[0, 63], eos=[5], **params)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logit_bias": {0: -100.0, 63: 100}, "seed": 2**64 - 1, "min_tokens": 3},
        {"temperature": 3.4e38, "top_k": 2**31 - 1, "repetition_penalty": 1e-30},
        {"temperature": 1e-300, "top_p": 1e-40, "seed": -(2**63)},
    ],
)
def test_what_fits(params: dict[str, Any]) -> None:
    check(good(**params))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("request_id", ["a"], r"request_id must be a text.*\['a'\]"),
        ("request_id", None, "request_id"),
        ("request_id", 1, "request_id"),
        ("request_id", "", "request_id"),
        ("prompt", [], "prompt is empty"),
        ("prompt", None, "prompt must be token ids from 0 to 63, found None"),
        ("prompt", "text", "prompt must be"),
        ("prompt", [1.5], "prompt must be"),
        ("prompt", [None], "prompt must be"),
        ("prompt", [[1]], "prompt must be"),
        ("prompt", [HUGE], "prompt must be"),
        ("prompt", [2**31], "prompt must be"),
        ("prompt", [64], "outside the vocabulary of 64"),
        ("prompt", [1, -1], "outside the vocabulary of 64"),
        ("prompt", [1] * 4, "The prompt has 4 tokens and max_tokens is 97.*at most 100"),
        ("max_tokens", 0, "max_tokens at least 1"),
        ("max_tokens", None, "max_tokens"),
        ("max_tokens", 1.0, "max_tokens"),
        ("max_tokens", HUGE, "max_tokens"),
        ("stop_token_ids", frozenset([64]), r"stop_token_ids has token ids \[64\] outside the vocabulary of 64"),
        ("stop_token_ids", frozenset([-1]), "stop_token_ids"),
        ("stop_token_ids", frozenset([None]), "stop_token_ids"),
        ("stop_token_ids", frozenset([1.5]), "stop_token_ids"),
        ("stop_token_ids", frozenset([HUGE]), "stop_token_ids"),
        ("eos_token_ids", frozenset([64]), "eos_token_id has token ids"),
    ],
    ids=shown,
)
def test_requests_that_do_not_fit(name: str, value: object, message: str) -> None:
    one = good()
    object.__setattr__(one, name, value)
    with pytest.raises(UsageError, match=message) as found:
        check(one)
    assert len(str(found.value)) < 400


NO_NUMBERS: list[Any] = [None, "x", [1], True, math.nan, math.inf, -math.inf, 1e39, -1e39, HUGE, Unprintable()]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=shown)
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
)
def test_numbers_that_do_not_fit_32_bits(name: str, value: object) -> None:
    """Although SamplingParams may have let them through: 1e39 is a number, and None may be a default."""
    one = good()
    object.__setattr__(one.params, name, value)
    with pytest.raises(UsageError, match=name):
        check(one)


@pytest.mark.parametrize("value", [None, "x", 1.5, True, 2**31, HUGE, Unprintable()], ids=shown)
def test_whole_numbers_that_do_not_fit(value: object) -> None:
    one = good()
    object.__setattr__(one.params, "top_k", value)
    with pytest.raises(UsageError):
        check(one)


@pytest.mark.parametrize("bias", [{64: 1.0}, {-1: 1.0}, {"5": 1.0}, {None: 1.0}, {True: 1.0}, {HUGE: 1.0}], ids=shown)
def test_biases_of_tokens_outside_the_vocabulary(bias: dict[Any, float]) -> None:
    one = good()
    object.__setattr__(one.params, "logit_bias", bias)
    with pytest.raises(UsageError, match="logit_bias has token ids"):
        check(one)


@pytest.mark.parametrize("value", [v for v in NO_NUMBERS if v != -math.inf], ids=shown)
def test_biases_that_are_no_numbers(value: object) -> None:
    one = good()
    object.__setattr__(one.params, "logit_bias", {5: value})
    with pytest.raises(UsageError, match="logit_bias of token 5"):
        check(one)


def test_forbidding_a_token_is_a_bias() -> None:
    one = good()
    object.__setattr__(one.params, "logit_bias", {5: -math.inf, 6: np.float32(1)})
    check(one)


@pytest.mark.parametrize("name", ["seed", "min_tokens"])
def test_parameters_of_a_wrong_type(name: str) -> None:
    one = good()
    object.__setattr__(one.params, name, "x")
    with pytest.raises(UsageError):
        check(one)
