"""The model's configuration: the part of a checkpoint's config.json that shapes the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from flint_plugins.ops import MASK_TOKENS
from flint_runtime.errors import CheckpointError

LayerType = Literal["full_attention", "sliding_attention"]

# What the kernels assume. A config that says otherwise describes another model.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


class ModelConfig(BaseModel):
    """Flint's shape. Field names are those of config.json (transformers' FlintConfig); lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    """Keys that a query of a sliding layer sees, itself included."""
    layer_types: tuple[LayerType, ...]
    mlp_only_layers: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {self.num_hidden_layers}"
            )
        if any(not 0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers {list(self.mlp_only_layers)} names a layer that does not exist")
        for name, value in self:
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name} must be positive, found {value}")
        if self.vocab_size % MASK_TOKENS:
            raise ValueError(
                f"vocab_size must be a multiple of {MASK_TOKENS}, the tokens of one word of a token mask, found "
                f"{self.vocab_size}; pad the embedding and the LM head"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError("num_experts_per_tok exceeds num_experts")
        return self

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention and no positions."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Layers with a sliding window and RoPE."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "sliding_attention")

    def is_full(self, layer: int) -> bool:
        """Whether a layer has full attention."""
        return self.layer_types[layer] == "full_attention"

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP instead of experts."""
        return layer in self.mlp_only_layers

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str) -> ModelConfig:
        """Read the dictionary of a config.json.

        Args:
            raw: the parsed file; missing fields take transformers' FlintConfig defaults where it has a rule.
            source: the file's name, for messages.
        Raises:
            CheckpointError: not a Flint config, a missing or contradictory value, or a value the kernels do not have.
        """
        if raw.get("model_type") != "flint":
            raise CheckpointError(
                f"{source}: model_type is {raw.get('model_type')!r}, expected 'flint'. "
                "Pass a Flint checkpoint, or its BF16 directory with --hf-config."
            )
        for name, value in _FIXED.items():
            if raw.get(name, value) != value:
                raise CheckpointError(f"{source}: {name} is {raw[name]!r}; Flint's kernels support only {value!r}.")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"{source}: rope_type is {rope['rope_type']!r}; only 'default' is supported.")
        layers = raw.get("num_hidden_layers", 0)
        values = {name: raw[name] for name in cls.model_fields if raw.get(name) is not None}
        values.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        values.setdefault("mlp_only_layers", [0, 1])
        if isinstance(layers, int) and 0 <= layers <= 10_000:
            values.setdefault("layer_types", default_layer_types(layers))
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()[:10])
            raise CheckpointError(f"{source} is not a valid Flint config: {problems}") from None
        no_rope = raw.get("no_rope_layer_indices")
        if no_rope is not None and sorted(no_rope) != list(config.full_layers):
            raise CheckpointError(
                f"{source}: no_rope_layer_indices {sorted(no_rope)} differs from the full-attention layers "
                f"{list(config.full_layers)} of layer_types; in Flint exactly those have no RoPE. Correct the file."
            )
        return config

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a config.json. Raises CheckpointError where it is missing, not JSON, or wrong."""
        try:
            raw = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; a checkpoint needs its config.json.") from None
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object.")
        return cls.from_hf(raw, str(path))


def default_layer_types(layers: int) -> list[LayerType]:
    """Flint's rule (transformers' FlintConfig): layers 0 and 1, every i % 4 == 1 and the last are full."""
    return ["full_attention" if i < 2 or i % 4 == 1 or i == layers - 1 else "sliding_attention" for i in range(layers)]
