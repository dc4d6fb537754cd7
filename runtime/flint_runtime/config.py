"""The model's configuration: the part of a checkpoint's config.json that shapes the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, StrictFloat, StrictInt, ValidationError, model_validator

from flint_plugins.ops import MASK_TOKENS
from flint_runtime.config_keys import check_keys
from flint_runtime.errors import CheckpointError
from flint_runtime.rope_parameters import rope_theta
from flint_runtime.small_files import MAX_CONFIG_BYTES, json_object, listed, read_small_file, shown

logger = logging.getLogger(__name__)

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Bound:
    """The values that a number may have, and why no others."""

    low: float
    high: float
    why: str


_SIZE = Bound(1, 1 << 16, "a row of more values is beyond any model of this kind")
_HEADS = Bound(1, 1 << 10, "more heads are beyond any model of this kind")

BOUNDS = {
    "vocab_size": Bound(1, 1 << 20, "some tables have a row per token and sequence"),
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": _SIZE,
    "num_hidden_layers": Bound(1, 256, "every layer is work for the build, and the released model has 49"),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": Bound(1, 1 << 10, "a longer head is beyond any model of this kind"),
    "sliding_window": Bound(1, 1 << 20, "every sequence keeps that many keys in every sliding layer"),
    "num_experts": Bound(1, 512, "the kernels sort tokens by at most 512 experts"),
    "num_experts_per_tok": Bound(1, 512, "there are at most 512 experts"),
    "max_position_embeddings": Bound(1, 1 << 24, "float32, in which RoPE's angles are computed, counts up to there"),
    "rms_norm_eps": Bound(2**-126, 1, "the kernels take it in float32, and more than 1 is no epsilon"),
    "rope_theta": Bound(1, 1e15, "its powers must be float32 numbers"),
}
"""Whatever a config.json or an engine.json says stays within these before anything loops over it or allocates by it."""


class ModelConfig(BaseModel):
    """Flint's shape. Field names are those of config.json (transformers' FlintConfig); lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: StrictInt
    hidden_size: StrictInt
    intermediate_size: StrictInt
    num_hidden_layers: StrictInt
    num_attention_heads: StrictInt
    num_key_value_heads: StrictInt
    head_dim: StrictInt
    sliding_window: StrictInt
    """Keys that a query of a sliding layer sees, itself included."""
    layer_types: tuple[LayerType, ...]
    mlp_only_layers: tuple[StrictInt, ...]
    num_experts: StrictInt
    num_experts_per_tok: StrictInt
    moe_intermediate_size: StrictInt
    shared_expert_intermediate_size: StrictInt
    max_position_embeddings: StrictInt
    rms_norm_eps: StrictFloat
    rope_theta: StrictFloat

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, bound in BOUNDS.items():
            value: Any = values.get(name)
            if type(value) in (int, float) and not bound.low <= value <= bound.high:
                raise ValueError(
                    f"{name} must be from {bound.low:g} to {bound.high:g}, found {shown(value)}: {bound.why}"
                )
        for name in ("layer_types", "mlp_only_layers"):
            value = values.get(name)
            if isinstance(value, list | tuple) and len(value) > BOUNDS["num_hidden_layers"].high:
                raise ValueError(f"{name} has {len(value)} entries, more than there can be layers")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {self.num_hidden_layers}"
            )
        if any(not 0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers {list(self.mlp_only_layers)} names a layer that does not exist")
        if len(set(self.mlp_only_layers)) != len(self.mlp_only_layers):
            raise ValueError(f"mlp_only_layers {list(self.mlp_only_layers)} names a layer twice")
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

    @property
    def leading_dense_layers(self) -> int | None:
        """How many layers at the start are dense, if no others are; else None."""
        count = len(self.mlp_only_layers)
        return count if sorted(self.mlp_only_layers) == list(range(count)) else None

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str) -> ModelConfig:
        """Read the dictionary of a config.json. Keys that nobody knows are named in one warning.

        Args:
            raw: the parsed file; missing fields take transformers' FlintConfig defaults where it has a rule.
            source: the file's name, for messages.
        Raises:
            CheckpointError: not a Flint config, a missing or contradictory value, or a value the kernels do not have.
        """
        if raw.get("model_type") != "flint":
            raise CheckpointError(
                f"{source}: model_type is {shown(raw.get('model_type'))}, expected 'flint'. "
                "Pass a Flint checkpoint, or its BF16 directory with --hf-config."
            )
        values = {name: raw[name] for name in cls.model_fields if raw.get(name) is not None}
        layers = values.get("num_hidden_layers")
        if type(layers) is int and layers <= BOUNDS["num_hidden_layers"].high:
            values.setdefault("layer_types", default_layer_types(layers))
            values.setdefault("mlp_only_layers", list(range(min(layers, 2))))
        try:
            values["rope_theta"] = rope_theta(raw)
            config = cls.model_validate(values)
            unknown = check_keys(raw, config)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in found[:5])
            raise CheckpointError(f"{source} is not a valid Flint config: {problems}.") from None
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}.") from None
        if unknown:
            logger.warning(
                "%s has %d keys that are not known and not used: %s.",
                source,
                len(unknown),
                listed([shown(name) for name in unknown]),
            )
        return config

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a config.json. Raises CheckpointError where it is missing, not JSON, or wrong."""
        try:
            raw = json_object(read_small_file(path, MAX_CONFIG_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; a checkpoint needs its config.json.") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is not a config.json: {error}.") from None
        return cls.from_hf(raw, str(path))


def default_layer_types(layers: int) -> list[LayerType]:
    """Flint's rule (transformers' FlintConfig): layers 0 and 1, every i % 4 == 1 and the last are full."""
    return ["full_attention" if i < 2 or i % 4 == 1 or i == layers - 1 else "sliding_attention" for i in range(layers)]
