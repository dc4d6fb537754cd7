"""Single ops at the released model's widths, for `bench_gpu`: records "op:<name>" and "sample".

Inputs rotate so that L2 does not serve what DRAM must: an op's sets of inputs are 256 MB or more together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS, FieldValue
from flint_runtime.manifest import WeightFormat, ring_tokens
from tests.bench import costs
from tests.bench.costs import Cost
from tests.bench.report import Record
from tests.gpu.inputs import EPS, node_inputs, node_weights, normal, rope_table, stream
from tests.gpu.ops import Timing, time_op
from tests.shapes import FLINT

CHUNK = 8192
SMALL_CHUNKS = (16, 64, 100, 256, 512, 1024)
"""Such as the scheduler makes of a long prompt while other requests decode."""
CONTEXTS = (1024, 32_768, 100_000, 262_144)
_ROTATED_BYTES = 256e6
_SHAPE = {
    "hidden": FLINT.hidden_size,
    "heads": FLINT.num_attention_heads,
    "kv_heads": FLINT.num_key_value_heads,
    "dense": FLINT.intermediate_size,
    "moe": FLINT.moe_intermediate_size,
    "shared": FLINT.shared_expert_intermediate_size,
    "experts": FLINT.num_experts,
}
_PRODUCTS = {
    "NormQkvRope": costs.qkv,
    "Linear": costs.output,
    "NormMlp": costs.mlp,
    "NormMoe": costs.moe,
    "LmHead": costs.head,
}
Inputs = dict[str, Tensor]


class OpBench:
    """Times ops and compares them with the rates that this run measured."""

    def __init__(self, tb_s: float, tflop_s: float) -> None:
        self.tb_s, self.tflop_s = tb_s, tflop_s

    def products(self, weights: WeightFormat) -> Iterator[Record]:
        """Every op with weights, for 1, 8, 32 and 8,192 tokens: LmHead (rows) up to 32, NormQkvRope prefill only."""
        for op, cost_of in _PRODUCTS.items():
            for tokens in {"LmHead": (1, 8, 32), "NormQkvRope": (CHUNK,)}.get(op, (1, 8, 32, CHUNK)):
                cost = cost_of(tokens, weights)
                fields, sets = _product_sets(op, weights, tokens, cost)
                timing = time_op(op, fields, sets, runs=40 if tokens < CHUNK else 1)
                del sets
                torch.cuda.empty_cache()
                yield self._record(f"op:{op}", weights, timing, cost, batch=1, context=0, tokens=tokens)

    def attention(self) -> Iterator[Record]:
        """Prefill of a chunk, and of small ones at 100K of context."""
        yield self._attention("full", 0, CHUNK)
        yield self._attention("sliding", 0, CHUNK)
        for tokens in SMALL_CHUNKS:
            yield self._attention("full", 100_000 - tokens, tokens)

    def decode_attention(self, weights: WeightFormat) -> Iterator[Record]:
        """NormQkvAttention, one token a sequence, over contexts and batches."""
        for batch, contexts in ((1, CONTEXTS), (8, CONTEXTS[:3])):
            for context in contexts:
                yield self._decode_attention(weights, "full", batch, context)
            yield self._decode_attention(weights, "sliding", batch, CONTEXTS[0])

    def _decode_attention(self, weights: WeightFormat, kind: str, batch: int, context: int) -> Record:
        cost = costs.qkv(batch, weights) + costs.attention(context - 1, 1, kind == "sliding") * batch
        sets = [_decode_inputs(weights, kind, batch, context) for _ in range(_count(cost))]
        fields: dict[str, FieldValue] = {
            "weights": weights, "eps": EPS, "has_residual": 1, "attention": kind,
            "window": FLINT.sliding_window if kind == "sliding" else 0, "num_heads": FLINT.num_attention_heads,
            "num_kv_heads": FLINT.num_key_value_heads, "head_dim": FLINT.head_dim,
        }  # fmt: skip
        timing = time_op("NormQkvAttention", fields, sets)
        del sets
        torch.cuda.empty_cache()
        return self._record("op:NormQkvAttention", weights, timing, cost, batch, context, batch, kind)

    def _attention(self, kind: str, start: int, new: int) -> Record:
        cost = costs.attention(start, new, kind == "sliding")
        fields: dict[str, FieldValue] = {
            "attention": kind,
            "phase": "prefill",
            "window": FLINT.sliding_window if kind == "sliding" else 0,
            "num_kv_heads": FLINT.num_key_value_heads,
        }
        sets = [_attention_inputs(kind, "prefill", 1, start, new) for _ in range(_count(cost))]
        timing = time_op("SinkAttention", fields, sets, runs=1)
        del sets
        torch.cuda.empty_cache()
        return self._record("op:SinkAttention", "", timing, cost, 1, start + new, new, f"{kind}, prefill")

    def sample(self, rows: int) -> Record:
        """Sample alone, as the released model is used."""
        timing = time_op("Sample", {}, [_sample_inputs(rows) for _ in range(_count(costs.sample(rows)))])
        note = "top-k 20, top-p 0.95"
        return self._record("sample", "", timing, costs.sample(rows), rows, context=0, tokens=rows, note=note)

    def _record(
        self,
        bench: str,
        weights: str,
        timing: Timing,
        cost: Cost,
        batch: int,
        context: int,
        tokens: int,
        note: str = "",
    ) -> Record:
        return Record(
            bench, weights, batch, context, tokens, round(timing.median_ms, 5), round(timing.p95_ms, 5),
            int(cost.bytes), round(cost.floor_ms(self.tb_s, self.tflop_s), 5), timing.kernels, note,
        )  # fmt: skip


def _count(cost: Cost) -> int:
    """Sets of inputs to rotate."""
    return min(64, max(3, math.ceil(_ROTATED_BYTES / cost.bytes)))


def _product_sets(
    op: str, weights: WeightFormat, tokens: int, cost: Cost
) -> tuple[dict[str, FieldValue], list[Inputs]]:
    panels = FLINT.vocab_size // 16
    # Other tokens choose other experts, so a few layers' experts serve many sets.
    layers = 8 if op == "NormMoe" else _count(cost)
    made = [node_weights(op, weights, _SHAPE, panels, "cuda") for _ in range(layers)]
    sets = []
    for i in range(4 * layers if op == "NormMoe" and tokens < CHUNK else layers):
        fields, inputs = node_inputs(op, weights, _SHAPE, tokens, tokens, "cuda", made[i % layers])
        sets.append(inputs)
    return fields, sets


def _attention_inputs(kind: str, phase: str, batch: int, start: int, new: int) -> Inputs:
    heads, kv_heads, dim = FLINT.num_attention_heads, FLINT.num_key_value_heads, FLINT.head_dim
    length, tokens = start + new, batch * new

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    inputs = {
        "q": normal(tokens, heads, dim, device="cuda"),
        "sinks": torch.randn(heads, device="cuda"),
        "positions": integers([start + i for _ in range(batch) for i in range(new)]),
        "query_start": integers([b * new for b in range(batch + 1)]),
        "seq_lens": integers([length] * batch),
    }
    if kind == "full":
        pages = -(-length // PAGE_TOKENS)
        order = torch.randperm(batch * pages, device="cuda").to(torch.int32)
        inputs["page_table"] = order.view(batch, pages)
        inputs["kv_pool"] = normal(batch * pages, kv_heads, 2, PAGE_TOKENS, dim, device="cuda")
        return inputs
    inputs["ring_slot"] = integers(list(range(batch)))
    inputs["kv_pool"] = normal(batch, kv_heads, 2, ring_tokens(FLINT.sliding_window), dim, device="cuda")
    if phase == "prefill":
        inputs["fresh_kv"] = normal(tokens, 2, kv_heads, dim, device="cuda")
    return inputs


def _decode_inputs(weights: WeightFormat, kind: str, batch: int, context: int) -> Inputs:
    inputs = _attention_inputs(kind, "decode", batch, context - 1, 1)
    del inputs["q"]
    inputs |= node_weights("NormQkvRope", weights, _SHAPE, 0, "cuda") | stream(batch, FLINT.hidden_size, "cuda")
    if kind == "sliding":
        inputs["rope"] = rope_table(context, "cuda")
    return inputs


def _sample_inputs(rows: int) -> Inputs:
    def reals(value: float) -> Tensor:
        return torch.full((rows,), value, device="cuda")

    def integers(value: int, *shape: int) -> Tensor:
        return torch.full(shape or (rows,), value, dtype=torch.int32, device="cuda")

    vocabulary = FLINT.vocab_size
    return {
        "logits": 3 * torch.randn(rows, vocabulary, device="cuda"),
        "temperature": reals(1.0),
        "top_k": integers(20),
        "top_p": reals(0.95),
        "min_p": reals(0.0),
        "repetition_penalty": reals(1.0),
        "presence_penalty": reals(0.0),
        "frequency_penalty": reals(0.0),
        "seed": integers(0, rows, 2),
        "draw_index": integers(0),
        "sample_slot": integers(-1),
        "forced_token": integers(-1),
        "sample_flags": integers(0),
        "token_counts": integers(0, 1, vocabulary),
        "last_tokens": integers(0, 1),
        "logit_bias": torch.zeros(1, vocabulary, device="cuda"),
        "token_mask": integers(-1, 1, vocabulary // 32),
    }
