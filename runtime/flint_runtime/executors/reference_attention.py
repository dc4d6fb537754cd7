"""SinkAttention in PyTorch on the CPU.

logits l = (q . k) * D^-0.5 in FP32 over the visible keys; m = max(l, sink); p = exp(l - m);
out = r(sum(r(p) * v) / (sum(p) + exp(sink - m))): P is rounded to BF16 for P.V only, the row sum takes the unrounded P
and the sink exactly once. Sums are FP64, rounded to FP32 once (see `reference_ops`); the rest is FP32.

Visible to the query at position p: full layers 0 ... p, sliding layers p - window + 1 ... p. Only entries of pages and
rings that hold visible keys are read: the others may hold NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS, FieldValue

_BLOCK_LOGITS = 1 << 23
"""Logits held at once: queries are taken in blocks."""


def sink_attention(fields: Mapping[str, FieldValue], t: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Attention of every sequence of a step; bindings as in the op's schema.

    In a sliding layer's prefill the earlier keys come from the ring and the step's own from fresh_kv; the last
    min(new, ring) of these are then stored in the ring, in place. Rows of padding give zeros.
    """
    q = t["q"]
    window = int(fields["window"])
    out = torch.zeros(q.shape, dtype=torch.bfloat16)
    start, lengths = t["query_start"].tolist(), t["seq_lens"].tolist()
    for b, length in enumerate(lengths):
        new = start[b + 1] - start[b]
        if not new:
            continue
        rows = slice(start[b], start[b + 1])
        if fields["attention"] == "full":
            first_key, keys = 0, _paged_keys(t["kv_pool"], t["page_table"][b], length)
        else:
            first_key = max(0, length - new - window + 1)
            ring = t["kv_pool"][int(t["ring_slot"][b])]
            fresh = t["fresh_kv"][rows].permute(2, 1, 0, 3) if "fresh_kv" in t else None
            stored = length if fresh is None else length - new
            keys = ring[:, :, torch.arange(first_key, stored) % ring.shape[2]]
            if fresh is not None:
                keys = torch.cat([keys, fresh], dim=2)
        out[rows] = _attend(q[rows], keys, t["sinks"], length - new, first_key, window)
        if "fresh_kv" in t and fresh is not None:
            kept = torch.arange(max(length - new, length - ring.shape[2]), length)
            ring[:, :, kept % ring.shape[2]] = fresh[:, :, -len(kept) :]
    outputs = {"out": out.flatten(1)}
    if "fresh_kv" in t:
        outputs["kv_pool_out"] = t["kv_pool"]
    return outputs


def _paged_keys(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` K and V of a sequence: pool [pages, Hkv, 2, 64, D] -> [Hkv, 2, length, D]."""
    pages = pool[table[: -(-length // PAGE_TOKENS)].long()]
    return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def _attend(q: Tensor, keys: Tensor, sinks: Tensor, first_query: int, first_key: int, window: int) -> Tensor:
    """Attention of one sequence: q [n, Hq, D] bf16, keys [Hkv, 2, L, D] bf16 -> [n, Hq, D] bf16.

    Args:
        first_query, first_key: positions of q's first row and of the first key; both run without gaps.
        window: 0 for all earlier keys.
    """
    new, heads, dim = q.shape
    kv_heads = keys.shape[0]
    out = torch.empty(new, heads, dim, dtype=torch.bfloat16)
    sink = sinks.float().view(kv_heads, -1, 1, 1)
    block = max(1, _BLOCK_LOGITS // (heads * keys.shape[2]))
    for row in range(0, new, block):
        rows = q[row : row + block]
        last = first_query + row + len(rows)
        low = max(first_key, first_query + row - window + 1) if window else first_key
        k, v = keys[:, :, low - first_key : last - first_key].double().unbind(1)
        # [Hkv, G, n, .] while masking, [Hkv, G * n, .] in the products: G query heads share a KV head.
        grouped = rows.double().view(len(rows), kv_heads, -1, dim).permute(1, 2, 0, 3)
        logits = (grouped.flatten(1, 2) @ k.transpose(1, 2)).float() * dim**-0.5
        logits = logits.view(*grouped.shape[:3], -1)
        distance = torch.arange(last - len(rows), last).unsqueeze(1) - torch.arange(low, last)
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        logits.masked_fill_(hidden, -torch.inf)
        top = torch.maximum(logits.amax(-1, keepdim=True), sink)
        p = torch.exp(logits - top)
        total = (p.sum(-1, keepdim=True, dtype=torch.float64) + torch.exp(sink - top)).float()
        values = (p.bfloat16().double().flatten(1, 2) @ v).float().view(grouped.shape) / total
        out[row : row + block] = values.permute(2, 0, 1, 3).reshape(len(rows), heads, dim).bfloat16()
    return out
