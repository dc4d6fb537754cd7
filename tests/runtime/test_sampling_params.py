"""SamplingParams: types and ranges, defaults, and what reaches the executor."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime.errors import UsageError
from flint_runtime.executors.step import RowSampling, SequencePart, build_step
from flint_runtime.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    generation_defaults,
)


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
        {"logit_bias": {1: float("nan")}}, {"structured_outputs": {"regex": "a"}}, {"temperature": 1e39},
        {"repetition_penalty": 1e39}, {"repetition_penalty": 1e-46}, {"presence_penalty": None}, {"min_tokens": None},
        {"temperature": np.array([1.0, 2.0])}, {"top_k": np.float32(3)}, {"top_k": np.True_}, {"max_tokens": "5"},
        {"stop": ["a"] * 17}, {"stop": ["a" * 1001]}, {"stop": b"a"}, {"stop": {"a": 1}}, {"stop": ["\ud800"]},
        {"stop": (text for text in "ab")}, {"stop_token_ids": "12"}, {"stop_token_ids": [2**31]},
        {"stop_token_ids": np.array(3)}, {"stop_token_ids": [True]}, {"bad_words": ["a"] * 129},
        {"bad_words": [""]}, {"bad_words": 5}, {"allowed_token_ids": []}, {"allowed_token_ids": ["a"]},
        {"logprob_token_ids": list(range(129))}, {"logprob_token_ids": [-1]}, {"detokenize": None},
        {"stop": ["a"], "detokenize": False}, {"logprobs": 3, "logprob_token_ids": [1, 2]}, {"output_kind": "delta"},
        {"output_kind": 1}, {"output_kind": None}, {"logit_bias": {"9" * 5000: 1}}, {"logit_bias": {1: 10**400}},
        {"logit_bias": {True: 1}},
    ],
    ids=lambda bad: ",".join(bad),
)  # fmt: skip
def test_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))) as caught:
        SamplingParams(**bad)
    assert isinstance(caught.value, UsageError) and len(str(caught.value)) < 400


class Hostile:
    """A value of the caller's that fails whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")


def nested() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


NONSENSE = [
    10**400, -(10**400), 10**5000, 1e39, -1e39, math.inf, math.nan, "x", "\ud800", b"x", object(), Hostile(), [None],
    [[1]], {"a": {}}, {None: None}, np.array([1, 2]), np.array(7), np.float64("nan"), float, nested(), range(3), 1j,
    2**31, 2**63, 2**64, -2, 0, 1, 0.5, -0.0, True, False, None, "", (), [], {}, [0], ["a"], {1: 1.0}, {"1": None},
]  # fmt: skip
NAMES = [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_value_is_it_is_taken_or_a_usage_error(name: str) -> None:
    """Taken means that a step can be packed with it."""
    for value in NONSENSE:
        try:
            params = SamplingParams(**{name: value})
        except UsageError as error:
            assert name in str(error) and len(str(error)) < 500
        else:
            check_packs(params)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(NONSENSE), max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_values_together_are_taken_or_a_usage_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except UsageError:
        return
    check_packs(params)


def check_packs(params: SamplingParams) -> None:
    filled = params.with_defaults({})
    row = filled.choice(filled.n - 1).row(3, 0)
    step = build_step([SequencePart((1,), 0, [0], 0, [(0, row)])])
    assert np.isfinite(step.temperature).all() and (step.repetition_penalty > 0).all()
    assert {type(getattr(params, name)) for name in ("top_k", "n", "min_tokens", "seed")} <= {int, type(None)}
    assert all(type(token) is int for token in (*params.stop_token_ids, *params.logit_bias))


def test_numpy_scalars_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.uint8(7), ignore_eos=np.True_,
        stop_token_ids=np.array([5, 6, 5]), allowed_token_ids={np.int32(4)}, logit_bias={np.int64(1): np.float16(2)},
    )  # fmt: skip
    assert (params.temperature, params.top_k, params.max_tokens, params.ignore_eos) == (0.5, 3, 7, True)
    assert params.stop_token_ids == (5, 6) and params.allowed_token_ids == (4,) and params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({}, "found none"),
        ({"regex": "a", "json": "{}"}, "found json and regex"),
        ({"json": 5}, "json must be"),
        ({"regex": ["a"]}, "regex must be"),
        ({"choice": "yes"}, "choice must be"),
        ({"choice": []}, "choice must be"),
        ({"choice": ["a", ""]}, "choice must have no empty"),
        ({"choice": ["a", 5]}, "choice must be a text"),
        ({"choice": 5}, "choice must be"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"json_object": False}, "json_object must be true"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"json_object": True, "json": {}}, "found json and json_object"),
        ({"whitespace_pattern": " "}, "found none"),
        ({"regex": "a", "whitespace_pattern": " "}, "is for json"),
        ({"json": "{}", "whitespace_pattern": 5}, "whitespace_pattern must be a text"),
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
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.4, seed=(5 << 32) + 6,
    ).with_defaults({})  # fmt: skip
    assert params.row(2, 1) == RowSampling(0.5, 7, 0.9, 0.1, 1.2, 0.3, 0.4, (6, 5), 2, 1)
    params = SamplingParams(logit_bias={1: 1.0}, structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.with_defaults({}).row(0, 0).use_bias and params.with_defaults({}).row(0, 0).use_mask
    assert SamplingParams(seed=-2).with_defaults({}).row(0, 0).seed == (0xFFFFFFFE, 0xFFFFFFFF)


def test_seed_of_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-1).with_defaults({}, lambda: 7).seed == 7


def test_from_optional_and_clone() -> None:
    given = {"n": None, "temperature": None, "stop": None, "logit_bias": {"3": 1}, "max_tokens": 5, "seed": None}
    assert SamplingParams.from_optional(**given) == SamplingParams(logit_bias={3: 1.0}, max_tokens=5)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams.from_optional(temprature=1.0)
    with pytest.raises(TypeError, match="positional"):  # vLLM's first is n: no number may land elsewhere
        SamplingParams(2)  # type: ignore[misc]
    params = SamplingParams(logit_bias={3: 1.0}, stop="a", structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.clone() == params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    with pytest.raises(FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]


def test_logprob_token_ids() -> None:
    params = SamplingParams(logprob_token_ids=[5, 5, 6])
    assert params.logprob_token_ids == (5, 6) and params.wants_logprobs
    many = list(range(100))
    assert SamplingParams(logprobs=100, logprob_token_ids=many).logprobs == 100
    assert not SamplingParams(logprob_token_ids=[]).wants_logprobs


def test_output_kinds_are_vllms() -> None:
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [
        ("CUMULATIVE", 0), ("DELTA", 1), ("FINAL_ONLY", 2),
    ]  # fmt: skip


def test_generation_config() -> None:
    assert generation_defaults(b"{}") == ({}, ())
    raw = {"temperature": 0.7, "eos_token_id": 5, "top_k": None, "other": 1}
    assert generation_defaults(json.dumps(raw).encode()) == ({"temperature": 0.7}, (5,))
    raw = {"do_sample": False, "temperature": 0.7, "eos_token_id": [5, 6]}
    assert generation_defaults(json.dumps(raw).encode()) == ({"temperature": 0.0}, (5, 6))
