"""Reading config.json."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import FlintConfig

from flint_runtime.config import BOUNDS, ModelConfig
from flint_runtime.config_keys import HARMLESS, NEUTRAL, check_keys
from flint_runtime.errors import CheckpointError
from flint_runtime.small_files import MAX_CONFIG_BYTES
from tests.shapes import FLINT, NANO, NANO_DIRECTORY

KINDS = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
RELEASED: dict[str, Any] = json.loads(
    FlintConfig(architectures=["FlintForCausalLM"], dtype="bfloat16").to_json_string(use_diff=False)
)
RAW: dict[str, Any] = json.loads((NANO_DIRECTORY / "config.json").read_text())


def test_defaults_agree_with_transformers() -> None:
    theirs = FlintConfig()
    assert list(FLINT.layer_types) == theirs.layer_types
    assert list(FLINT.mlp_only_layers) == theirs.mlp_only_layers
    for name, value in FLINT:
        if name not in ("layer_types", "mlp_only_layers", "rope_theta"):
            assert getattr(theirs, name) == value, name
    assert FLINT.full_layers == (0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48)
    assert len(FLINT.sliding_layers) == 35


def test_config_that_transformers_saved(tmp_path: Path) -> None:
    FlintConfig(**RAW).save_pretrained(tmp_path)
    assert ModelConfig.from_file(tmp_path / "config.json") == NANO


def test_no_rope_layer_indices_must_be_the_full_layers() -> None:
    assert ModelConfig.from_hf({**RAW, "no_rope_layer_indices": [5, 1, 0]}, "c") == NANO
    with pytest.raises(CheckpointError, match=r"\[0, 1\] differs.*\[0, 1, 5\]"):
        ModelConfig.from_hf({**RAW, "no_rope_layer_indices": [0, 1]}, "c")


def released(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it, with changes; None removes a key."""
    return {name: value for name, value in copy.deepcopy(RELEASED | changes).items() if value is not None}


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(raw, "some/config.json")
    text = str(caught.value)
    assert "some/config.json" in text and "\n" not in text and text.endswith(".") and len(text) < 1000
    return text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "'llama', expected 'flint'"),
        ({"num_hidden_layers": 7}, "layer_types has 6 entries"),
        ({"mlp_only_layers": [9]}, "names a layer that does not exist"),
        ({"mlp_only_layers": [0, 0]}, "names a layer twice"),
        ({"hidden_size": -1}, "hidden_size must be from 1 to 65536, found -1"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 128.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 784}, "vocab_size must be a multiple of 32, .*, found 784"),
        ({"num_experts": 4}, "num_experts_per_tok exceeds"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"mlp_only_layers": list(range(1000))}, "mlp_only_layers has 1000 entries"),
        ({"no_rope_layer_indices": {"a": 1}}, "no_rope_layer_indices is .*expected a list"),
        ({"no_rope_layer_indices": ["a"]}, "no_rope_layer_indices is .*expected a list"),
    ],
)
def test_wrong_config(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, refused({**RAW, **changes}))


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", [0, -1, 10**6 + 10**18, 16_000_000_000_000, 10**400, math.nan, math.inf, -math.inf])
def test_numbers_are_bounded_before_anything_loops(name: str, value: float) -> None:
    start = time.process_time()
    text = refused({**RAW, name: value})
    assert name in text and time.process_time() - start < 1


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_holds_for_an_engine_too(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        ModelConfig.model_validate_json(json.dumps(NANO.model_dump() | {name: 10**16}))


def test_numbers_of_the_released_model_are_far_from_the_bounds() -> None:
    for name, bound in BOUNDS.items():
        assert bound.low <= getattr(FLINT, name) * (2 if name != "rms_norm_eps" else 1) <= bound.high, name


# ---------------------------------------------------------------------------------------------------------------- RoPE

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_parameters": None},
    {"rope_parameters": PLAIN},
    {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_parameters": {"rope_theta": 500000}},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
    {"rope_parameters": PLAIN, "rope_theta": 5e5},
    {"rope_parameters": PLAIN, "rope_scaling": None},
    {"rope_parameters": PLAIN | {"type": "default"}},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_scaling": PLAIN},
    {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
    {"rope_parameters": PLAIN, "rope_scaling": PLAIN},
    {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": None}},
    {"rope_parameters": {"sliding_attention": PLAIN}},
    {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": PLAIN}},
    {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": None}, "rope_theta": 5e5},
    {"partial_rotary_factor": 1.0, "rope_parameters": PLAIN},
]


def oracle_theta(changes: dict[str, Any]) -> tuple[str, float]:
    """Kind and base frequency of the sliding layers, as transformers reads them."""
    theirs = FlintConfig(**copy.deepcopy(released(rope_parameters=None) | changes)).rope_parameters
    theirs = theirs.get("sliding_attention", theirs)
    return theirs["rope_type"], theirs["rope_theta"]


@pytest.mark.parametrize("changes", ROPES, ids=str)
def test_rope_as_transformers(changes: dict[str, Any]) -> None:
    raw = released(rope_parameters=None) | changes
    assert ("default", ModelConfig.from_hf(raw, "c").rope_theta) == oracle_theta(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": "x"}, "rope_parameters is 'x', expected an object"),
        ({"rope_scaling": [1]}, "rope_scaling is .1., expected an object"),
        *(({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4}}, f"rope_type is '{kind}'") for kind in KINDS),
        *(({"rope_scaling": {"type": kind, "factor": 4.0}}, f"rope_scaling.type is '{kind}'") for kind in KINDS),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_scaling.type is 'yarn'"),
        ({"rope_parameters": PLAIN, "rope_theta": 1e4}, "rope_parameters.rope_theta is 500000 and rope_theta is 10000"),
        (
            {"rope_parameters": PLAIN, "rope_scaling": {"rope_theta": 1e6}},
            "rope_parameters is .* and rope_scaling is .*; they must agree",
        ),
        (
            {"rope_parameters": {"sliding_attention": PLAIN}, "rope_theta": 1e4},
            "sliding_attention.rope_theta is 500000",
        ),
        ({"rope_parameters": {"sliding_attention": {"type": "linear"}}}, "sliding_attention.type is 'linear'"),
        ({"rope_parameters": {"sliding_attention": None, "full_attention": PLAIN}}, "sliding_attention is None"),
        ({"rope_parameters": {"full_attention": PLAIN}}, "sliding_attention is None, expected an object"),
        ({"rope_parameters": {"sliding_attention": PLAIN, "full_attention": {"rope_theta": 1e6}}}, "full_attention is"),
        ({"rope_parameters": {"sliding_attention": PLAIN, "rope_theta": 1e4}}, "'rope_theta' beside parameters per"),
        ({"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": PLAIN | {"factor": 8.0}}, "factor is 8.0"),
        ({"rope_parameters": PLAIN | {"mrope_section": [1, 2]}}, "'mrope_section'"),
        ({"rope_parameters": PLAIN | {"surprise": 1}}, "'surprise'"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big', expected a finite number"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta is True"),
        ({"rope_theta": [1e4]}, "rope_theta is"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": 0.5}, "rope_theta must be from 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
    ids=str,
)
def test_rope_that_is_refused(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(released(rope_parameters=None) | changes))


_THETAS = st.sampled_from([None, 1e4, 5e5, 10000])
_PART = st.fixed_dictionaries(
    {},
    optional={
        "rope_theta": _THETAS,
        "rope_type": st.sampled_from([None, "default", "linear", "yarn"]),
        "type": st.sampled_from([None, "default", "linear"]),
        "factor": st.sampled_from([None, 1.0, 4.0]),
        "partial_rotary_factor": st.sampled_from([None, 1.0, 0.5]),
    },
)
_NESTED = st.fixed_dictionaries(
    {}, optional={"sliding_attention": st.none() | _PART, "full_attention": st.none() | _PART}
)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "rope_parameters": st.none() | _PART | _NESTED,
            "rope_scaling": st.none() | _PART,
            "rope_theta": _THETAS,
        },
    )
)
def test_rope_that_is_read_is_what_transformers_reads(changes: dict[str, Any]) -> None:
    """Any combination: refused, or the kind and the frequency that transformers takes."""
    changes = {name: value for name, value in changes.items() if value is not None}
    try:
        ours = ModelConfig.from_hf(released(rope_parameters=None) | copy.deepcopy(changes), "c").rope_theta
    except CheckpointError:
        return
    kind, theta = oracle_theta(changes)
    assert kind in ("default", None)
    assert theta is None or ours == theta  # with an explicit null transformers computes nothing


# ---------------------------------------------------------------------------------------------------------------- keys


def test_keys_of_every_checkpoint_pass_silently(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    FlintConfig(**RAW).save_pretrained(tmp_path)
    vllm = {"router_score_function": "sigmoid", "use_sliding_window": True, "no_rope_layer_indices": [0, 1, 5]}
    old = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "_name_or_path": "x", "auto_map": {"a": "b"}}
    for raw in (RAW, RAW | vllm | old, json.loads((tmp_path / "config.json").read_text()), released()):
        ModelConfig.from_hf(raw, "c")
    ModelConfig.from_hf(RAW | {"quantization_config": None, "use_cache": False, "attention_dropout": 0.1}, "c")
    assert not caplog.records


def test_every_field_of_transformers_is_classified() -> None:
    raw = json.loads(FlintConfig().to_json_string(use_diff=False))
    assert check_keys({name: value for name, value in raw.items() if name != "architectures"}, FLINT) == []
    known = HARMLESS | NEUTRAL.keys() | ModelConfig.model_fields.keys() | {"rope_parameters", "architectures"}
    assert {f.name for f in dataclasses.fields(FlintConfig)} <= known
    assert not HARMLESS & (NEUTRAL.keys() | ModelConfig.model_fields.keys())


@pytest.mark.parametrize("name", NEUTRAL)
def test_keys_that_change_numbers_are_checked(name: str) -> None:
    for value in (*NEUTRAL[name], None):
        ModelConfig.from_hf(RAW | {name: value}, "c")
    for value in ("other", 7, {"a": 1}):
        assert f"{name} is {value!r}" in refused(RAW | {name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "modelopt"}}, "quantization_config is .*another quantisation"),
        ({"architectures": ["FlintForSequenceClassification"]}, "architectures is .*expected .'FlintForCausalLM'"),
        ({"architectures": "FlintForCausalLM"}, "architectures is"),
        ({"num_local_experts": 8}, "num_local_experts is 8; Flint's kernels support only 16"),
        ({"n_shared_experts": 3}, "n_shared_experts is 3"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace is 1; .*only 2"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_keys_that_contradict_the_model(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(RAW | changes))


def test_names_of_other_models_for_the_same() -> None:
    same = {"num_local_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 2, "kv_channels": 128}
    assert ModelConfig.from_hf(RAW | same, "c") == NANO


def test_unknown_keys_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    ModelConfig.from_hf(RAW | {f"new_{i}": i for i in range(12)} | {"new_null": None, "a\nb": 1}, "some/config.json")
    (record,) = caplog.records
    text = record.getMessage()
    assert "some/config.json" in text and "13 keys" in text and "'new_0'" in text and "and 3 more" in text
    assert "\n" not in text and "new_null" not in text


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "holds a JSON list"),
        (b"3", "holds a JSON number"),
        (b"null", "holds a JSON null"),
        (b"\xff{}", "not UTF-8 at byte 0"),
        (b'{"a": NaN}', "number 'NaN'"),
        (b'{"a": -Infinity}', "number '-Infinity'"),
        (b'{"a": 1e999}', "number '1e999'"),
        (b'{"a": 1' + b"0" * 400 + b"}", "beyond 64 bits"),
        (b'{"a": 1' + b"0" * 10_000 + b"}", "beyond 64 bits"),
        (b'{"a": 1, "a": 2}', "key 'a' occurs twice"),
        (b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}", "nested more than"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested more than"),
        (b"{}" + b" " * MAX_CONFIG_BYTES, "longer than"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unreadable_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000
    assert time.process_time() - start < 2


def test_missing_is_told_from_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_file(tmp_path / "no.json")
    with pytest.raises(CheckpointError, match=r"not a regular file|cannot be read"):
        ModelConfig.from_file(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        ModelConfig.from_file(tmp_path / "pipe.json")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from([*RAW, *NEUTRAL, "rope_scaling", "rope_theta", "x"]), _VALUES, max_size=3)
)
def test_any_value_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        ModelConfig.from_hf(RAW | changes, "c")
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
