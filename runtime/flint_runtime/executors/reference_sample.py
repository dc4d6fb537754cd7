"""Sample in numpy: bias, mask, penalties, filters and the seeded draw, so that a GPU kernel matches it bit for bit.

Per row, on FP32 logits l:

1. A row with a logit that is NaN or infinite, or that bias or penalties make NaN, or with every token forbidden, draws
   -1 (`NO_TOKEN`), with NaN logprobs; nothing is counted.
2. logprobs are log-softmax of the raw logits (vLLM's "raw_logprobs"): (l - max) - log(sum(exp(l - max))), FP32. The 20
   best by l, ties to the lowest index. Sums have no fixed order: logprobs agree between executors within 1e-4.
3. Bias and penalties, each operation rounded to FP32 (no fused multiply-add), in vLLM's order. With USE_BIAS:
   l = l + bias. n = times generated; in prompt or generated: l = l / r if l > 0 else l * r; then l = l - frequency * n;
   then l = l - presence if n > 0; at last clamped to the finite FP32 range. l = -inf, which is never drawn, where the
   bias is -inf or, with USE_MASK, the mask's bit is 0. sample_slot -1: none of these, and nothing is recorded.
4. temperature <= 0: the largest l, ties to the lowest index.
5. x = (l - max) / temperature, two FP32 roundings. weight w = exp(x) as an integer multiple of 2^-40 (`exp_weights`).
   From here on everything is integer arithmetic, so no order of summation matters.
6. Kept are the tokens that pass, in vLLM's order: min-p: w >= min(min_p, 1) * 2^40; top-k: l >= the k-th largest l
   (ties with it are kept); top-p: the sum of all larger kept weights is < limit = max(1, floor(p * total)), where total
   is the sum of the weights kept so far, and product and conversions are in double (round to nearest).
7. Draw: the first two words of Philox4x32-10(counter = (draw_index, 0, 0, 0), key = seed) form u, word 0 low;
   target = (u * total of the kept weights) >> 64; the token is the first, by index, whose running sum of kept weights
   exceeds target.
8. The token's count rises by one, and last_tokens keeps the token, also if it is -1. Rows that share a sample_slot all
   see the counts from before the step; the last of them leaves its token.

A row with forced_token >= 0 is that token instead of steps 3 to 8, with its logprob by step 2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MASK_TOKENS, MAX_LOGPROBS, USE_BIAS, USE_MASK
from flint_runtime.executors.base import NO_TOKEN, PROMPT_FLAG
from flint_runtime.executors.step import Float32, Int32

UInt64 = npt.NDArray[np.uint64]

WEIGHT_BITS = 40
"""A weight of 2^40 is the likeliest token's: 2^22 tokens cannot overflow 63 bits."""
_LOG2_E = np.float32(1.44269504)
# 2^f for |f| <= 0.5, Horner from the last: Taylor coefficients ln(2)^i / i!, relative error 2e-7.
_EXP2 = [
    np.float32(c) for c in (1.0, 0.693147181, 0.240226507, 0.0555041087, 0.00961812911, 0.00133335581, 0.000154035304)
]
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); 32-bit words."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        low, high = a * _PHILOX_MULTIPLIERS[0], c * _PHILOX_MULTIPLIERS[1]
        a, b, c, d = (high >> 32) ^ b ^ k0, high & _WORD, (low >> 32) ^ d ^ k1, low & _WORD
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _WORD, (k1 + _PHILOX_WEYL[1]) & _WORD
    return a, b, c, d


def exp_weights(x: Float32) -> UInt64:
    """floor(exp(x) * 2^40) for x <= 0, from operations that IEEE 754 rounds exactly, none fused.

    y = x * log2(e); 0 where y < -41; n = rint(y) (ties to even); f = y - n; 2^f by Horner's rule, each product and sum
    rounded to FP32; times 2^(n + 40), truncated. -inf gives 0. x [V] f32 -> [V] uint64.
    """
    with np.errstate(over="ignore"):
        y = np.maximum(x * _LOG2_E, np.float32(-64))
    n = np.rint(y)
    f = y - n
    value = np.full_like(f, _EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        value = value * f + coefficient
    weights: UInt64 = np.ldexp(value, n.astype(np.int32) + WEIGHT_BITS).astype(np.uint64)
    weights[y < -41] = 0
    return weights


def keep_weights(logits: Float32, weights: UInt64, top_k: int, top_p: float, min_p: float) -> UInt64:
    """Zero the weights of the tokens that min-p, top-k and top-p drop (step 6 above)."""
    kept: UInt64 = weights.copy()
    if min_p > 0:
        kept[weights < np.uint64(np.ceil(min(np.float64(min_p), 1.0) * 2.0**WEIGHT_BITS))] = 0
    if 0 < top_k < len(logits):
        kept[logits < np.partition(logits, -top_k)[-top_k]] = 0
    if top_p < 1:
        order = np.sort(kept)[::-1]
        running = np.cumsum(order, dtype=np.uint64)
        limit = max(1, int(np.float64(top_p) * np.float64(running[-1])))
        last = np.flatnonzero(running - order < np.uint64(limit))[-1]
        kept[kept < order[last]] = 0
    return kept


def draw_token(kept: UInt64, seed: tuple[int, int], draw_index: int) -> int:
    """Draw a token in proportion to its weight (step 7 above)."""
    low, high, _, _ = philox4x32((draw_index & _WORD, 0, 0, 0), (seed[0] & _WORD, seed[1] & _WORD))
    running = np.cumsum(kept, dtype=np.uint64)
    target = ((high << 32 | low) * int(running[-1])) >> 64
    return int(np.searchsorted(running, np.uint64(target), side="right"))


def apply_penalties(logits: Float32, counts: Int32, repetition: float, presence: float, frequency: float) -> Float32:
    """The penalties of step 3 above, not clamped: logits [V] f32, counts [V] as in token_counts -> [V] f32."""
    generated = counts & np.int32(PROMPT_FLAG - 1)
    factor = np.float32(repetition)
    with np.errstate(over="ignore"):
        penalised = np.where(logits > 0, logits / factor, logits * factor)
    result: Float32 = np.where(counts != 0, penalised, logits)
    result = result - np.float32(frequency) * generated.astype(np.float32)
    result = np.where(generated > 0, result - np.float32(presence), result)
    return result


def unpack_mask(words: Int32) -> npt.NDArray[np.bool_]:
    """Whether each token is allowed: [V / 32] words as in token_mask -> [V]."""
    bits = words[:, None] >> np.arange(MASK_TOKENS, dtype=np.int32) & 1
    allowed: npt.NDArray[np.bool_] = bits.reshape(-1) != 0
    return allowed


def adjust_logits(
    logits: Float32,
    bias: Float32 | None,
    allowed: npt.NDArray[np.bool_] | None,
    counts: Int32,
    repetition: float,
    presence: float,
    frequency: float,
) -> Float32:
    """Step 3 above: logits [V] f32, bias [V] f32, allowed [V] bool, counts [V] as in token_counts -> [V] f32."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        biased = logits if bias is None else logits + bias
        result = apply_penalties(biased, counts, repetition, presence, frequency)
    largest = np.finfo(np.float32).max
    result = np.clip(result, -largest, largest)
    if bias is not None:
        result[bias == -np.inf] = -np.inf
    if allowed is not None:
        result[~allowed] = -np.inf
    return result


def log_softmax(logits: Float32) -> Float32:
    """Step 2 above: [V] f32 -> [V] f32."""
    shifted = logits - logits.max()
    result: Float32 = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
    return result


def _best(logits: Float32, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest, best first, ties to the lowest index."""
    candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def sample(
    *,
    logits: Float32,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32,
    repetition_penalty: Float32,
    presence_penalty: Float32,
    frequency_penalty: Float32,
    seed: Int32,
    draw_index: Int32,
    forced_token: Int32,
    sample_flags: Int32,
    sample_slot: Int32,
    token_counts: Int32,
    last_tokens: Int32,
    logit_bias: Float32,
    token_mask: Int32,
) -> dict[str, Int32 | Float32]:
    """The op Sample: shapes and dtypes of its schema. token_counts and last_tokens are updated in place.

    Returns:
        tokens [R] int32, logprobs [R] f32, top_tokens [R, 20] int32, top_logprobs [R, 20] f32.
    """
    rows = len(logits)
    tokens = np.full(rows, NO_TOKEN, np.int32)
    logprobs = np.full(rows, np.nan, np.float32)
    top_tokens = np.full((rows, MAX_LOGPROBS), NO_TOKEN, np.int32)
    top_logprobs = np.full((rows, MAX_LOGPROBS), np.nan, np.float32)
    for row in range(rows):
        raw, slot, token = logits[row], int(sample_slot[row]), int(forced_token[row])
        if not np.isfinite(raw).all():
            continue
        if token < 0:
            adjusted = raw
            if slot >= 0:
                penalties = repetition_penalty[row], presence_penalty[row], frequency_penalty[row]
                bias = logit_bias[slot] if sample_flags[row] & USE_BIAS else None
                allowed = unpack_mask(token_mask[slot]) if sample_flags[row] & USE_MASK else None
                adjusted = adjust_logits(raw, bias, allowed, token_counts[slot], *penalties)
                if np.isnan(adjusted).any() or adjusted.max() == -np.inf:
                    continue
            token = int(adjusted.argmax())
            if temperature[row] > 0:
                with np.errstate(over="ignore"):
                    x = (adjusted - adjusted[token]) / temperature[row]
                kept = keep_weights(adjusted, exp_weights(x), int(top_k[row]), float(top_p[row]), float(min_p[row]))
                token = draw_token(kept, (int(seed[row, 0]), int(seed[row, 1])), int(draw_index[row]))
        every = log_softmax(raw)
        tokens[row], logprobs[row] = token, every[token]
        top_tokens[row] = _best(raw, MAX_LOGPROBS)
        top_logprobs[row] = every[top_tokens[row]]
    recorded = (forced_token < 0) & (sample_slot >= 0)
    counted = recorded & (tokens >= 0)
    np.add.at(token_counts, (sample_slot[counted], tokens[counted]), 1)
    for slot, token in zip(sample_slot[recorded], tokens[recorded], strict=True):
        last_tokens[slot] = token
    return {"tokens": tokens, "logprobs": logprobs, "top_tokens": top_tokens, "top_logprobs": top_logprobs}
