"""The engine's weights: which tensors each file holds, and from which checkpoint tensors each is made.

A tensor's name is the name of the graph input it feeds. Source names are those of the BF16 checkpoint; the experts of
a layer count as one stacked source, `model.layers.N.mlp.experts.gate_proj.weight` [E, I, H], however they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from flint_plugins.ops import DType
from flint_runtime.config import ModelConfig
from flint_runtime.manifest import WeightFormat

DTYPE_BYTES: dict[DType, int] = {"bf16": 2, "f32": 4, "i32": 4, "i8": 1}


@dataclass(frozen=True)
class EngineTensor:
    """One tensor of the engine: a graph input and an entry of a weight file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that the engine needs, by its Hugging Face name, and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """How engine tensors are made from checkpoint tensors.

    copy: one source, converted to the tensor's dtype.
    table: no source; the RoPE table (`rope_table`).
    pack: sources stacked along their rows, then packed (`flint_plugins.layout`); NVFP4 adds a tensor of scales, one
        per source (and expert).
    pack_gate_up: like pack, with the two sources interleaved.
    """

    kind: Literal["copy", "table", "pack", "pack_gate_up"]
    sources: tuple[Source, ...]
    outputs: tuple[EngineTensor, ...]


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file below weights/."""

    name: str
    recipes: tuple[Recipe, ...]

    @property
    def tensors(self) -> tuple[EngineTensor, ...]:
        """Every tensor of the file, in file order."""
        return tuple(t for recipe in self.recipes for t in recipe.outputs)


def weight_files(
    config: ModelConfig, weights: WeightFormat, router_dtype: DType, max_context: int
) -> tuple[WeightFile, ...]:
    """Plan the weight files of an engine: one for the embedding, one per layer, one for the head.

    Args:
        weights: format of the packed matrices.
        router_dtype: "bf16" or "f32", the checkpoint's own.
        max_context: rows of the RoPE table, in tokens.
    """
    c = config
    hidden, heads, kv_heads, dim = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def copy(name: str, source: str, dtype: DType, *shape: int) -> Recipe:
        return Recipe("copy", (Source(source, shape),), (EngineTensor(name, dtype, shape),))

    def packed(
        kind: Literal["pack", "pack_gate_up"],
        name: str,
        sources: list[tuple[str, int]],
        columns: int,
        scale: tuple[int, ...],
        lead: tuple[int, ...] = (),
    ) -> Recipe:
        rows = sum(n for _, n in sources)
        inputs = tuple(Source(f"{source}.weight", (*lead, n, columns)) for source, n in sources)
        if weights == "bf16":
            return Recipe(kind, inputs, (EngineTensor(f"{name}.weight", "bf16", (*lead, rows // 16, 16 * columns)),))
        tensor = EngineTensor(f"{name}.weight", "i8", (*lead, rows // 16, 9 * columns))
        return Recipe(kind, inputs, (tensor, EngineTensor(f"{name}.scale", "f32", (*lead, *scale))))

    def mlp(ours: str, theirs: str, size: int) -> list[Recipe]:
        gate_up = [(f"{theirs}.gate_proj", size), (f"{theirs}.up_proj", size)]
        return [
            packed("pack_gate_up", f"{ours}.gate_up", gate_up, hidden, (2,)),
            packed("pack", f"{ours}.down", [(f"{theirs}.down_proj", hidden)], size, (1,)),
        ]

    def layer(index: int) -> WeightFile:
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        attn = f"{theirs}.self_attn"
        qkv = [(f"{attn}.q_proj", heads * dim), (f"{attn}.k_proj", kv_heads * dim), (f"{attn}.v_proj", kv_heads * dim)]
        recipes = [
            copy(f"{ours}.attn.norm", f"{theirs}.input_layernorm.weight", "f32", hidden),
            packed("pack", f"{ours}.attn.qkv", qkv, hidden, (3,)),
            copy(f"{ours}.attn.q_norm", f"{attn}.q_norm.weight", "f32", dim),
            copy(f"{ours}.attn.k_norm", f"{attn}.k_norm.weight", "f32", dim),
            copy(f"{ours}.attn.sinks", f"{attn}.softmax_offset", "f32", heads),
            packed("pack", f"{ours}.attn.out", [(f"{attn}.o_proj", hidden)], heads * dim, (1,)),
            copy(f"{ours}.mlp.norm", f"{theirs}.post_attention_layernorm.weight", "f32", hidden),
        ]
        if c.is_dense(index):
            recipes += mlp(f"{ours}.mlp", f"{theirs}.mlp", c.intermediate_size)
        else:
            size, lead = c.moe_intermediate_size, (c.num_experts,)
            experts = f"{theirs}.mlp.experts"
            gate_up = [(f"{experts}.gate_proj", size), (f"{experts}.up_proj", size)]
            recipes += [
                copy(f"{ours}.mlp.router", f"{theirs}.mlp.gate.weight", router_dtype, c.num_experts, hidden),
                packed("pack_gate_up", f"{ours}.mlp.experts.gate_up", gate_up, hidden, (2,), lead),
                packed("pack", f"{ours}.mlp.experts.down", [(f"{experts}.down_proj", hidden)], size, (), lead),
                *mlp(f"{ours}.mlp.shared", f"{theirs}.mlp.shared_expert", c.shared_expert_intermediate_size),
            ]
        return WeightFile(f"layer-{index:02d}.safetensors", tuple(recipes))

    embedding = [copy("embedding", "model.embed_tokens.weight", "bf16", c.vocab_size, hidden)]
    if c.sliding_layers:
        embedding.append(Recipe("table", (), (EngineTensor("rope", "f32", (max_context, dim)),)))
    head = (
        copy("head.norm", "model.norm.weight", "f32", hidden),
        packed("pack", "head", [("lm_head", c.vocab_size)], hidden, (1,)),
    )
    return (
        WeightFile("embedding.safetensors", tuple(embedding)),
        *(layer(i) for i in range(c.num_hidden_layers)),
        WeightFile("head.safetensors", head),
    )
