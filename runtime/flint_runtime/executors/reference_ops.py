"""The ops of `flint_plugins.ops` in PyTorch on the CPU, by the rules of the design's numerics.

Activations are BF16, r() is round-to-nearest-even to BF16. Where the rules say that a sum is accumulated in FP32, the
order is open; here it is summed in FP64 and rounded to FP32 once. That is the value every order approximates, and it
does not depend on how tokens are batched: decode and prefill agree to the bit, up to one FP32 rounding in 10^8.
NVFP4 weights are e2m1 * e4m3 (exact in BF16); their FP32 tensor scale multiplies the accumulator, rounded to FP32.

Every function takes a node's fields and its inputs by binding name and returns its outputs by binding name; shapes and
dtypes are those of the op's schema. Attention is in `reference_attention`, Sample in `reference_sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS, FieldValue
from flint_runtime.executors.reference_attention import sink_attention
from flint_runtime.executors.reference_sample import sample
from flint_runtime.executors.reference_weights import WeightCache

Fields = Mapping[str, FieldValue]
Tensors = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """r(x * rsqrt(mean(x^2) + eps) * w): x [..., H] f32, w [H] f32 -> [..., H] bf16."""
    mean = x.double().square().mean(-1, keepdim=True).float()
    return (x * torch.rsqrt(mean + eps) * weight).bfloat16()


def _add_norm(fields: Fields, t: Tensors) -> tuple[Tensor, Tensor]:
    """s = delta + residual in FP32; returns the norm of the unrounded s, bf16, and r(s)."""
    total = t["delta"].float()
    if "residual" in t:
        total = total + t["residual"].float()
    return rms_norm(total, t["norm"], float(fields["eps"])), total.bfloat16()


def _matmul(x: Tensor, matrix: Tensor, scales: Tensor | None, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """FP32 accumulators of x W^T, split into column groups of `sizes`, each times its tensor scale.

    x [T, K] bf16, matrix [N, K] f64, scales [len(sizes)] f32 -> [T, size] f32 each.
    """
    parts = torch.split((x.double() @ matrix.T).float(), list(sizes), dim=-1)
    if scales is None:
        return parts
    return tuple(part * scale for part, scale in zip(parts, scales.reshape(-1), strict=True))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """r(g / (1 + exp(-g)) * u), in FP32 until the rounding."""
    gate, up = gate.float(), up.float()
    return (gate / (1 + torch.exp(-gate)) * up).bfloat16()


def _swiglu(x: Tensor, t: Tensors, prefix: str, cache: WeightCache) -> Tensor:
    """Dense SwiGLU: gate and up rounded to BF16, act = silu_mul, y = r(act W_down^T). [T, H] bf16 -> [T, H] bf16."""
    matrix = cache.matrix(t[f"{prefix}gate_up"], gate_up=True)
    size = matrix.shape[0] // 2
    gate, up = _matmul(x, matrix, t.get(f"{prefix}gate_up_scale"), (size, size))
    act = silu_mul(gate.bfloat16(), up.bfloat16())
    down = cache.matrix(t[f"{prefix}down"])
    return _matmul(act, down, t.get(f"{prefix}down_scale"), (down.shape[0],))[0].bfloat16()


def embedding(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """out[t] = table[token], where token = token_ids[t] or, if negative, last_tokens[-1 - token_ids[t]]; else NaN."""
    ids, last, table = t["token_ids"].long(), t["last_tokens"].long(), t["table"]
    slots = -1 - ids
    drawn = torch.where(slots < len(last), last[slots.clamp(0, len(last) - 1)], -1)
    tokens = torch.where(ids < 0, drawn, ids)
    out = table[tokens.clamp(0, len(table) - 1)]
    out[(tokens < 0) | (tokens >= len(table))] = torch.nan
    return {"out": out}


def linear(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """y = r(sum(x * w) * tensor_scale)."""
    matrix = cache.matrix(t["weight"])
    return {"y": _matmul(t["x"], matrix, t.get("weight_scale"), (matrix.shape[0],))[0].bfloat16()}


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """NeoX rotation in FP32: (x1 cos - x2 sin, x2 cos + x1 sin), rounded to BF16.

    x [T, heads, D] bf16; table [C, D] f32, row p = cos(p * f_i) for i < D / 2, then sin(p * f_i).
    """
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).bfloat16()


def norm_qkv_rope(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """Residual add and norm; q, k, v = r(x W^T); q and k normed per head, rounded, and rotated on sliding layers.

    K and V go to kv_pool in place (full: page_table[b, p / 64], entry p % 64; sliding decode: ring entry p % ring) or
    to fresh_kv. Rows from query_start[B] on are padding and written nowhere.
    """
    heads, kv_heads, dim = (int(fields[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    x, residual_out = _add_norm(fields, t)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    parts = _matmul(x, cache.matrix(t["qkv"]), t.get("qkv_scale"), sizes)
    q, k, v = (part.bfloat16().view(len(x), -1, dim) for part in parts)
    eps = float(fields["eps"])
    q, k = rms_norm(q.float(), t["q_norm"], eps), rms_norm(k.float(), t["k_norm"], eps)
    if "rope" in t:
        q, k = (apply_rope(y, t["rope"], t["positions"]) for y in (q, k))
    outputs = {"q": q}
    if "residual" in t:
        outputs["residual_out"] = residual_out
    if "kv_pool" in t:
        _write_pool(t, k, v)
        outputs["kv_pool_out"] = t["kv_pool"]
    else:
        outputs["fresh_kv"] = torch.stack([k, v], dim=1)
    return outputs


def _write_pool(t: Tensors, k: Tensor, v: Tensor) -> None:
    """Write the rows of k and v [T, Hkv, D] that belong to a sequence into the pool, in place."""
    start = t["query_start"].long()
    used = int(start[-1])
    sequence = torch.repeat_interleave(torch.arange(len(start) - 1), start.diff())
    positions = t["positions"][:used].long()
    if "page_table" in t:
        place = t["page_table"].long()[sequence, positions // PAGE_TOKENS]
        entry = positions % PAGE_TOKENS
    else:
        place = t["ring_slot"].long()[sequence]
        entry = positions % t["kv_pool"].shape[3]
    t["kv_pool"][place, :, 0, entry] = k[:used]
    t["kv_pool"][place, :, 1, entry] = v[:used]


def norm_mlp(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """Residual add and norm, then dense SwiGLU."""
    x, residual_out = _add_norm(fields, t)
    return {"out": _swiglu(x, t, "", cache), "residual_out": residual_out}


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose experts: [T, H] bf16 -> expert indices [T, k] int64, best first, and weights [T, k] f32.

    Logits are FP32 sums over the router weight in its own type; ties go to the lowest index. score = 1 / (1 + exp(-l)),
    weight = score / sum of the chosen scores.
    """
    logits = (x.double() @ router.double().T).float()
    chosen = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]
    scores = 1 / (1 + torch.exp(-logits.gather(-1, chosen)))
    return chosen, scores / scores.sum(-1, keepdim=True)


def norm_moe(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """Residual add and norm, then the chosen experts and the shared expert.

    Per expert gate and up stay FP32, act = silu_mul, y_e = r(acc_e * scale_e). routed = r(sum w_e * y_e), an FP32 sum
    in slot order (best expert first); out = r(routed + shared).
    """
    x, residual_out = _add_norm(fields, t)
    chosen, weights = route(x, t["router"], int(fields["top_k"]))
    outputs = torch.empty(*chosen.shape, x.shape[-1], dtype=torch.bfloat16)
    gate_up_scale, down_scale = t.get("experts_gate_up_scale"), t.get("experts_down_scale")
    for expert in sorted(set(chosen.flatten().tolist())):
        token, slot = torch.nonzero(chosen == expert, as_tuple=True)
        matrix = cache.matrix(t["experts_gate_up"][expert], gate_up=True)
        size = matrix.shape[0] // 2
        gate, up = _matmul(x[token], matrix, None if gate_up_scale is None else gate_up_scale[expert], (size, size))
        down = cache.matrix(t["experts_down"][expert])
        scale = None if down_scale is None else down_scale[expert]
        outputs[token, slot] = _matmul(silu_mul(gate, up), down, scale, (down.shape[0],))[0].bfloat16()
    routed = torch.zeros(x.shape)
    for j in range(chosen.shape[1]):
        routed += weights[:, j, None] * outputs[:, j].float()
    shared = _swiglu(x, t, "shared_", cache)
    return {"out": (routed.bfloat16().float() + shared.float()).bfloat16(), "residual_out": residual_out}


def lm_head(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """Residual add and norm of the rows asked for; logits = FP32 accumulator * tensor scale, not rounded."""
    rows = t["logits_rows"].long()
    x, _ = _add_norm(fields, {**t, "delta": t["delta"][rows], "residual": t["residual"][rows]})
    matrix = cache.matrix(t["weight"])
    return {"logits": _matmul(x, matrix, t.get("weight_scale"), (matrix.shape[0],))[0]}


def attention(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """SinkAttention: see `reference_attention`."""
    return sink_attention(fields, t)


def norm_qkv_attention(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """NormQkvRope, which writes K and V to the pool, and SinkAttention, which reads them there."""
    outputs = norm_qkv_rope(fields, t, cache)
    q = outputs.pop("q")
    return outputs | sink_attention(fields, {**t, "q": q})


def draw(fields: Fields, t: Tensors, cache: WeightCache) -> dict[str, Tensor]:
    """Sample: see `reference_sample`."""
    arrays = {name: tensor.numpy() for name, tensor in t.items()}
    outputs = {name: torch.from_numpy(array) for name, array in sample(**arrays).items()}
    return {**outputs, "token_counts_out": t["token_counts"], "last_tokens_out": t["last_tokens"]}


REFERENCE_OPS: dict[str, Callable[[Fields, Tensors, WeightCache], dict[str, Tensor]]] = {
    "Embedding": embedding,
    "NormQkvRope": norm_qkv_rope,
    "SinkAttention": attention,
    "NormQkvAttention": norm_qkv_attention,
    "Linear": linear,
    "NormMlp": norm_mlp,
    "NormMoe": norm_moe,
    "LmHead": lm_head,
    "Sample": draw,
}
