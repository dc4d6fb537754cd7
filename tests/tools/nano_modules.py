"""Faster forwards for training flint-nano in BF16 on the CPU, with the formulas of transformers' Flint modules."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import FlintConfig, FlintForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.flint.modeling_flint import FlintExperts, FlintRMSNorm, FlintTopKRouter


@torch.compile(dynamic=True)
def _sink_softmax(scores: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of scores [B, Hkv, G, S, S] bf16 + mask [S, S] f32 with sinks [Hkv, G] f32.

    Returns the weights in BF16, and the sink's share [B, Hkv, G, S, 1] f32.
    """
    scores = scores.float() + mask
    sink = sinks[None, :, :, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp()
    sink_weight = (sink - top).exp()
    total = weights.sum(-1, keepdim=True) + sink_weight
    return (weights / total).to(torch.bfloat16), sink_weight / total


@torch.compile(dynamic=True)
def _sink_softmax_backward(
    grad_weights: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the scores [B * Hkv, G * S, S] bf16, and grad . out [B * Hkv, G * S, 1] f32."""
    row = (grad.float() * out.float()).sum(-1, keepdim=True)
    return ((grad_weights.float() - row) * weights.float()).to(torch.bfloat16), row


@torch.compile(dynamic=True)
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), scale


@torch.compile(dynamic=True)
def _norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normal = x.float() * scale
    wide = grad.float()
    grad_weight = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
    wide = wide * weight.float()
    mean = (wide * normal).mean(-1, keepdim=True)
    return ((wide - normal * mean) * scale).to(x.dtype), grad_weight


@torch.compile(dynamic=True)
def _gated(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * weight of all experts; gate_up [T, E, 2 I] bf16, weights [T, E] f32, result [T, E * I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float() * weights[..., None]).to(gate_up.dtype).flatten(1)


class _SinkAttention(torch.autograd.Function):
    """softmax([q k^T * scaling + mask, sink])[:-1] v for one group of query heads per KV head, in BF16 products.

    Shapes: query [B * Hkv, G * S, D], key and value [B * Hkv, S, D], mask [S, S], sinks [Hkv, G] f32.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        length, heads, groups = key.shape[1], *sinks.shape
        scores = torch.bmm(query, key.transpose(1, 2)).view(-1, heads, groups, length, length)
        weights, sink_share = _sink_softmax(scores, mask, sinks)
        weights = weights.view(-1, groups * length, length)
        out = torch.bmm(weights, value)
        ctx.save_for_backward(query, key, value, weights, sink_share, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, weights, sink_share, out = ctx.saved_tensors
        (grad,) = grads
        grad_value = torch.bmm(weights.transpose(1, 2), grad)
        grad_weights = torch.bmm(grad, value.transpose(1, 2))
        grad_scores, row = _sink_softmax_backward(grad_weights, weights, grad, out)
        grad_query = torch.bmm(grad_scores, key)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query)
        grad_sinks = -(row.view(sink_share.shape) * sink_share).sum((0, 3, 4))
        return grad_query, grad_key, grad_value, None, grad_sinks


def sink_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with sinks, as transformers' eager function computes it.

    Args:
        query: [B, Hq, S, D] bf16; key, value: [B, Hkv, S, D] bf16.
        attention_mask: [S, S] f32, additive.

    Returns:
        [B, S, Hq, D] bf16.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    out = _SinkAttention.apply(
        (query * scaling).reshape(batch * kv_heads, -1, dim),
        key.reshape(-1, length, dim),
        value.reshape(-1, length, dim),
        attention_mask,
        module.sinks.view(kv_heads, -1),
    )
    return out.view(batch, heads, length, dim).transpose(1, 2).contiguous(), None


class _RMSNorm(torch.autograd.Function):
    """RMSNorm over the last dimension in F32; x [..., D] bf16, weight [D] bf16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, scale = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_norm_backward(grads[0], *ctx.saved_tensors), None


def fast_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Replaces FlintRMSNorm.forward."""
    result: torch.Tensor = _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)
    return result


def dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens, weighted by the router, zero where not selected.

    Args:
        hidden_states: [T, H] bf16; top_k_index, top_k_weights: [T, 6] i64, f32.

    Returns:
        [T, H] bf16.
    """
    experts, _, hidden = self.gate_up_proj.shape
    weights = top_k_weights.new_zeros(hidden_states.shape[0], experts).scatter(1, top_k_index, top_k_weights)
    gate_up = F.linear(hidden_states, self.gate_up_proj.reshape(-1, hidden))
    activated = _gated(gate_up.view(hidden_states.shape[0], experts, -1), weights)
    return F.linear(activated, self.down_proj.transpose(1, 2).reshape(-1, hidden).t())


def install_fast_modules(model: FlintForCausalLM) -> list[torch.Tensor]:
    """Replace the slow forwards of `model`; return the list to which every router appends its logits [T, E]."""
    ALL_ATTENTION_FUNCTIONS.register("nano_sink", sink_attention)
    model.config._attn_implementation = "nano_sink"
    router_logits: list[torch.Tensor] = []
    module: Any
    for module in model.modules():
        if isinstance(module, FlintRMSNorm):
            module.forward = MethodType(fast_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, FlintExperts):
            module.forward = MethodType(dense_experts, module)  # type: ignore[method-assign]
        elif isinstance(module, FlintTopKRouter):
            module.register_forward_hook(lambda _module, _inputs, out: router_logits.append(out[0]))
    return router_logits


def training_masks(config: FlintConfig, length: int) -> dict[str, torch.Tensor]:
    """Additive causal masks of both layer kinds for `sink_attention`, [S, S] f32."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    causal = distance >= 0
    window = causal & (distance < config.sliding_window)
    masks = {"full_attention": causal, "sliding_attention": window}
    return {kind: torch.zeros(length, length).masked_fill(~seen, -torch.inf) for kind, seen in masks.items()}
