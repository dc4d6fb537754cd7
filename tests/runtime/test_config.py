"""Reading config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import FlintConfig

from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError
from tests.shapes import FLINT, NANO, NANO_DIRECTORY

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "'llama', expected 'flint'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"num_hidden_layers": 7}, "layer_types has 6 entries"),
        ({"mlp_only_layers": [9]}, "names a layer that does not exist"),
        ({"hidden_size": -1}, "hidden_size must be positive"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 784}, "vocab_size must be a multiple of 32, .*, found 784"),
        ({"num_experts": 4}, "num_experts_per_tok exceeds"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types"),
    ],
)
def test_wrong_config(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")) as caught:
        ModelConfig.from_hf({**RAW, **changes}, "some/config.json")
    assert "some/config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_unreadable_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_file(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_file(tmp_path / "no.json")
