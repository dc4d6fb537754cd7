"""SamplingParams: ranges, defaults, and what reaches the executor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flint_runtime.errors import UsageError
from flint_runtime.executors.step import RowSampling
from flint_runtime.sampling_params import SamplingParams, StructuredOutputsParams, generation_defaults


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "1"}, {"temperature": True},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 1.01}, {"min_p": -0.1},
        {"repetition_penalty": 0.0}, {"presence_penalty": 2.5}, {"frequency_penalty": -3}, {"seed": 2**64},
        {"max_tokens": 0}, {"ignore_eos": 1}, {"stop_token_ids": (-1,)}, {"stop_token_ids": ("a",)},
        {"stop_token_ids": 5}, {"n": 0}, {"n": None}, {"n": 1000}, {"n": 2, "temperature": 0}, {"min_tokens": -1},
        {"min_tokens": 3, "max_tokens": 2}, {"stop": [""]}, {"stop": 5}, {"stop": [5]}, {"logprobs": 21},
        {"logprobs": True}, {"prompt_logprobs": -1}, {"skip_special_tokens": None}, {"include_stop_str_in_output": 0},
        {"logit_bias": [1]}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {"x": 1}}, {"logit_bias": {1: 101}},
        {"logit_bias": {1: float("nan")}}, {"structured_outputs": {"regex": "a"}},
    ],
)  # fmt: skip
def test_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({}, "found none"),
        ({"regex": "a", "json": "{}"}, "found json and regex"),
        ({"json": 5}, "json must be"),
        ({"regex": ["a"]}, "regex must be"),
        ({"choice": "yes"}, "choice must be"),
        ({"choice": []}, "choice must be"),
    ],
)
def test_structured_outputs_are_exactly_one(bad: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        StructuredOutputsParams(**bad)


def test_none_and_single_values() -> None:
    """As JSON has them: null, a single stop, texts as keys."""
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    bias: Any = {"12": 3, 13: -100}
    params = SamplingParams(stop="\n", logit_bias=bias)
    assert params.stop == ("\n",) and params.logit_bias == {12: 3.0, 13: -100.0}


def test_s6_off_and_greedy() -> None:
    for off in (0, -1):
        row = SamplingParams(top_k=off, top_p=1.0, temperature=0.0, seed=2**64 - 1).with_defaults({}).row(0, 0)
        assert row.top_k in (0, -1) and row.top_p == 1.0 and row.temperature == 0.0 and row.seed == (2**32 - 1,) * 2


def test_s9_choices_have_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=2**64 - 2, logit_bias={1: 2.0}, prompt_logprobs=2).with_defaults({})
    assert [params.choice(i).prompt_logprobs for i in range(3)] == [2, None, None]
    assert [params.choice(i).seed for i in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    assert params.choice(1).n == 1 and params.choice(1).logit_bias == {1: 2.0}
    with pytest.raises(UsageError, match="n must be 1 at temperature 0"):
        SamplingParams(n=2).with_defaults({"temperature": 0.0})


def test_defaults_of_the_model() -> None:
    params = SamplingParams().with_defaults({})
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.95, 20)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    assert params.seed is not None and params.seed != SamplingParams().with_defaults({}).seed


def test_the_checkpoint_overrides_and_the_request_wins() -> None:
    params = SamplingParams(top_k=0, seed=3).with_defaults({"temperature": 0.6, "top_k": 50})
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.6, 0.95, 0, 3)


def test_row() -> None:
    params = SamplingParams(0.5, 0.9, 7, 0.1, 1.2, 0.3, 0.4, seed=(5 << 32) + 6).with_defaults({})
    assert params.row(2, 1) == RowSampling(0.5, 7, 0.9, 0.1, 1.2, 0.3, 0.4, (6, 5), 2, 1)
    params = SamplingParams(0.5, logit_bias={1: 1.0}, structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.with_defaults({}).row(0, 0).use_bias and params.with_defaults({}).row(0, 0).use_mask
    assert SamplingParams(seed=-1).with_defaults({}).row(0, 0).seed == (0xFFFFFFFF, 0xFFFFFFFF)


def test_generation_config() -> None:
    assert generation_defaults(b"{}") == ({}, ())
    raw = {"temperature": 0.7, "eos_token_id": 5, "top_k": None, "other": 1}
    assert generation_defaults(json.dumps(raw).encode()) == ({"temperature": 0.7}, (5,))
    raw = {"do_sample": False, "temperature": 0.7, "eos_token_id": [5, 6]}
    assert generation_defaults(json.dumps(raw).encode()) == ({"temperature": 0.0}, (5, 6))
