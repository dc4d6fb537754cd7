"""Flint's configuration keys, and the name, shape and type of every tensor in its two checkpoint formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tests.tools import nvfp4
from tests.tools.nano_data import NANO_DIR

Config = dict[str, Any]
Dtype = Literal["BF16", "F32", "NVFP4"]


@dataclass(frozen=True)
class TensorSpec:
    """Name, logical shape (rows first, as in PyTorch) and stored type of one checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """Size in the file, without the companion scale of an NVFP4 tensor."""
        values = int(np.prod(self.shape))
        if self.dtype == "NVFP4":
            return values // nvfp4.SUPER_VALUES * nvfp4.SUPER_BYTES
        return values * (2 if self.dtype == "BF16" else 4)


def flint_config(
    *,
    layers: int = 49,
    hidden: int = 2048,
    experts: int = 256,
    top_k: int = 6,
    heads: int = 32,
    kv_heads: int = 4,
    head_dim: int = 128,
    intermediate: int = 6144,
    moe_intermediate: int = 512,
    shared_intermediate: int = 1024,
    vocab: int = 150144,
    window: int = 513,
    context: int = 262144,
    **overrides: Any,
) -> Config:
    """A complete config.json, by default of the released model; `overrides` are further config.json keys.

    The token ids are those of flint-nano's tokenizer, which random checkpoints carry.
    """
    config: Config = {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": window,
        "layer_types": layer_types(layers),
        "mlp_only_layers": [i for i in (0, 1) if i < layers],
        "decoder_sparse_step": 1,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": moe_intermediate,
        "shared_expert_intermediate_size": shared_intermediate,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0005,
        "bos_token_id": None,
    }
    nano = NANO_DIR / "config.json"
    if nano.exists():
        ids = json.loads(nano.read_text())
        config |= {key: ids[key] for key in ("pad_token_id", "eos_token_id")}
    return config | overrides


def layer_types(layers: int) -> list[str]:
    """Flint's rule: full attention in layers 0 and 1, every fourth from there, and the last; the others slide."""
    return ["full_attention" if i < 2 or i % 4 == 1 or i == layers - 1 else "sliding_attention" for i in range(layers)]


def is_dense(config: Config, layer: int) -> bool:
    """Whether the layer has a dense MLP instead of experts."""
    return layer in config["mlp_only_layers"] or config["num_experts"] == 0


def gguf_to_hf(name: str) -> str:
    """Hugging Face name of a GGUF weight; stacked experts keep `experts.{}` for the expert's index."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, tail, _ = name.split(".")
    tails = {
        "attn_norm": "input_layernorm.weight",
        "ffn_norm": "post_attention_layernorm.weight",
        "attn_output": "self_attn.o_proj.weight",
        "attn_sinks": "self_attn.softmax_offset",
        "ffn_gate_inp": "mlp.gate.weight",
    }
    tails |= {f"attn_{x}": f"self_attn.{x}_proj.weight" for x in "qkv"}
    tails |= {f"attn_{x}_norm": f"self_attn.{x}_norm.weight" for x in "qk"}
    for x in ("gate", "up", "down"):
        tails[f"ffn_{x}"] = f"mlp.{x}_proj.weight"
        tails[f"ffn_{x}_exps"] = f"mlp.experts.{{}}.{x}_proj.weight"
        tails[f"ffn_{x}_shexp"] = f"mlp.shared_expert.{x}_proj.weight"
    return f"model.layers.{layer}.{tails[tail]}"


def gguf_specs(config: Config) -> list[TensorSpec]:
    """Every weight of the NVFP4 GGUF in file order; the companion scales are not listed."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    experts, moe = config["num_experts"], config["moe_intermediate_size"]
    specs = [TensorSpec("token_embd.weight", (config["vocab_size"], hidden), "BF16")]

    def add(name: str, shape: tuple[int, ...], dtype: Dtype = "NVFP4") -> None:
        specs.append(TensorSpec(f"blk.{layer}.{name}.weight", shape, dtype))

    def add_mlp(suffix: str, intermediate: int, stack: tuple[int, ...] = ()) -> None:
        add(f"ffn_gate{suffix}", (*stack, intermediate, hidden))
        add(f"ffn_up{suffix}", (*stack, intermediate, hidden))
        add(f"ffn_down{suffix}", (*stack, hidden, intermediate))

    for layer in range(config["num_hidden_layers"]):
        add("attn_norm", (hidden,), "F32")
        add("attn_q", (heads, hidden))
        add("attn_k", (kv_heads, hidden))
        add("attn_v", (kv_heads, hidden))
        add("attn_q_norm", (head_dim,), "F32")
        add("attn_k_norm", (head_dim,), "F32")
        add("attn_sinks", (config["num_attention_heads"],), "F32")
        add("attn_output", (hidden, heads))
        add("ffn_norm", (hidden,), "F32")
        if is_dense(config, layer):
            add_mlp("", config["intermediate_size"])
        else:
            add("ffn_gate_inp", (experts, hidden), "F32")
            add_mlp("_exps", moe, (experts,))
            add_mlp("_shexp", config["shared_expert_intermediate_size"])
    specs.append(TensorSpec("output_norm.weight", (hidden,), "F32"))
    specs.append(TensorSpec("output.weight", (config["vocab_size"], hidden), "NVFP4"))
    return specs


def hf_dtype(name: str) -> Dtype:
    """Router and sinks are F32 in the released BF16 checkpoint, everything else BF16."""
    return "F32" if name.endswith(("mlp.gate.weight", "softmax_offset")) else "BF16"


def hf_specs(config: Config) -> list[TensorSpec]:
    """Every tensor of the BF16 checkpoint, one per expert."""
    specs = []
    for spec in gguf_specs(config):
        name = gguf_to_hf(spec.name)
        names = [name.format(e) for e in range(spec.shape[0])] if "{}" in name else [name]
        shape = spec.shape[1:] if "{}" in name else spec.shape
        specs += [TensorSpec(n, shape, hf_dtype(n)) for n in names]
    return specs


def scale_name(weight_name: str) -> str:
    """Name of the companion tensor with the tensor scale."""
    return weight_name.removesuffix("weight") + "scale"
