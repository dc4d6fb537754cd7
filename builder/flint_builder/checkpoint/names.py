"""Tensor names: Hugging Face's, which the plan of weight files uses, and those of GGUF."""

from __future__ import annotations

import re

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.softmax_offset": "attn_sinks.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SHARD = re.compile(r".*-(\d{1,9})-of-(\d{1,9})\.(?:gguf|safetensors)")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate|up|down)_proj\.weight")


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that the plan calls `name` (stacked experts count as one tensor).

    Raises KeyError for a name that Flint does not have.
    """
    if match := _HF_LAYER.fullmatch(name):
        return f"blk.{match[1]}.{_LAYER[match[2]]}"
    return _GLOBAL[name]


def scale_names(name: str) -> tuple[str, str]:
    """GGUF's names of the tensor scale of the NVFP4 tensor `name`: "<base>.scale", or "<name>.scale"."""
    return name.removesuffix(".weight") + ".scale", name + ".scale"


def input_scale_name(name: str) -> str:
    """GGUF's name of the scale of the activations that the NVFP4 tensor `name` is multiplied with."""
    return name.removesuffix(".weight") + ".input_scale"


def split_experts(name: str) -> tuple[str, str] | None:
    """Split "model.layers.N.mlp.experts.gate_proj.weight" into (the part up to "experts", "gate"); None for others."""
    match = _EXPERTS.fullmatch(name)
    return (match[1], match[2]) if match else None


def shard_of(file_name: str) -> tuple[int, int] | None:
    """Split "a-00001-of-00003.gguf" into (1, 3): which part of how many a file is by its name; None for others."""
    match = _SHARD.fullmatch(file_name)
    return (int(match[1]), int(match[2])) if match else None
