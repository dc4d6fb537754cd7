"""What the released model's ops and steps must move and multiply at least, for the floors of the benchmark.

Bytes: weights (of experts, those that are expected to be chosen, each once), K and V, logits. Activations, norms and
what a step is told are left out: under 1 % of a decode step. FLOPs: 2 per multiply-add of products and attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from flint_runtime.manifest import WeightFormat
from tests.shapes import FLINT

VALUE_BYTES: dict[WeightFormat, float] = {"nvfp4": 0.5625, "bf16": 2.0}
_KV_BYTES = 2 * FLINT.num_key_value_heads * FLINT.head_dim * 2
"""Of one token in one layer."""


@dataclass(frozen=True)
class Cost:
    """Fewest bytes and FLOPs."""

    bytes: float
    flops: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.bytes * times, self.flops * times)

    def floor_ms(self, tb_s: float, tflop_s: float) -> float:
        """Time at a bandwidth and an arithmetic rate, whichever takes longer."""
        return max(self.bytes / tb_s, self.flops / tflop_s) / 1e9


def product(rows: int, columns: int, tokens: int, weights: WeightFormat) -> Cost:
    """A [rows, columns] weight times `tokens` tokens."""
    return Cost(rows * columns * VALUE_BYTES[weights], 2 * rows * columns * tokens)


def qkv(tokens: int, weights: WeightFormat) -> Cost:
    """NormQkvRope."""
    heads = FLINT.num_attention_heads + 2 * FLINT.num_key_value_heads
    return product(heads * FLINT.head_dim, FLINT.hidden_size, tokens, weights)


def output(tokens: int, weights: WeightFormat) -> Cost:
    """Linear: attention's output projection."""
    return product(FLINT.hidden_size, FLINT.num_attention_heads * FLINT.head_dim, tokens, weights)


def mlp(tokens: int, weights: WeightFormat) -> Cost:
    """NormMlp."""
    return product(3 * FLINT.intermediate_size, FLINT.hidden_size, tokens, weights)


def moe(tokens: int, weights: WeightFormat) -> Cost:
    """NormMoe, the router in FP32."""
    c = FLINT
    touched = c.num_experts * (1 - (1 - c.num_experts_per_tok / c.num_experts) ** tokens)
    expert = product(3 * c.moe_intermediate_size, c.hidden_size, 1, weights)
    routed = Cost(expert.bytes * touched, expert.flops * c.num_experts_per_tok * tokens)
    router = Cost(c.num_experts * c.hidden_size * 4, 2 * c.num_experts * c.hidden_size * tokens)
    return routed + router + product(3 * c.shared_expert_intermediate_size, c.hidden_size, tokens, weights)


def attention(start: int, new: int, sliding: bool) -> Cost:
    """SinkAttention of one layer and sequence: `new` tokens behind `start` earlier ones; keys are read once."""
    length, window = start + new, FLINT.sliding_window
    if sliding:
        seen = sum(min(position + 1, window) for position in range(start, length))
        keys = length - max(0, start - window + 1)
    else:
        seen, keys = new * start + new * (new + 1) // 2, length
    return Cost(keys * _KV_BYTES, 4 * FLINT.num_attention_heads * FLINT.head_dim * seen)


def head(rows: int, weights: WeightFormat) -> Cost:
    """LmHead: the weight, and the logits written."""
    return product(FLINT.vocab_size, FLINT.hidden_size, rows, weights) + Cost(rows * FLINT.vocab_size * 4, 0)


def sample(rows: int) -> Cost:
    """Sample: the logits read."""
    return Cost(rows * FLINT.vocab_size * 4, 0)


def step(sequences: int, start: int, new: int, weights: WeightFormat) -> Cost:
    """A whole step: `new` tokens of each sequence behind `start` earlier ones, a row of logits each."""
    c, tokens = FLINT, sequences * new
    dense = len(c.mlp_only_layers)
    total = (qkv(tokens, weights) + output(tokens, weights)) * c.num_hidden_layers
    total += mlp(tokens, weights) * dense + moe(tokens, weights) * (c.num_hidden_layers - dense)
    total += attention(start, new, sliding=False) * (len(c.full_layers) * sequences)
    total += attention(start, new, sliding=True) * (len(c.sliding_layers) * sequences)
    return total + head(sequences, weights)


def prefill(tokens: int, chunk: int, weights: WeightFormat) -> Cost:
    """A prompt in chunks: the weights are read anew by each, and so are the keys before it."""
    total = Cost(0, 0)
    for start in range(0, tokens, chunk):
        total += step(1, start, min(chunk, tokens - start), weights)
    return total
