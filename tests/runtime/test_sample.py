"""Sample: each step of its definition against a plain formula, and vLLM's meaning of bias, filters and penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flint_plugins.ops import MASK_TOKENS, USE_BIAS, USE_MASK
from flint_runtime.executors.base import NO_TOKEN, PROMPT_FLAG
from flint_runtime.executors.reference_sample import (
    WEIGHT_BITS,
    apply_penalties,
    draw_token,
    exp_weights,
    keep_weights,
    log_softmax,
    philox4x32,
    sample,
    unpack_mask,
)

V = 64
Float32 = npt.NDArray[np.float32]


def random_logits(rows: int = 1, seed: int = 0, scale: float = 3.0) -> Float32:
    """[rows, V] without ties."""
    return (scale * np.random.default_rng(seed).standard_normal((rows, V))).astype(np.float32)


def run(
    logits: Float32, counts: npt.NDArray[np.int32] | None = None, *, bias: Float32 | None = None,
    allowed: npt.NDArray[np.bool_] | None = None, last: npt.NDArray[np.int32] | None = None, **params: Any,
) -> dict[str, Any]:  # fmt: skip
    """Sample with the same parameters in every row, or given per row; greedy by default.

    Args:
        counts, bias [slots, V], last [slots]: states; without them no counts, and a bias that must not be used.
        allowed: [slots, V]; without it a mask that forbids everything.
    """
    rows = len(logits)
    floats = {
        "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }  # fmt: skip
    ints = {"top_k": 0, "draw_index": 0, "sample_slot": -1, "forced_token": -1, "sample_flags": 0}
    arrays: dict[str, Any] = {
        n: np.broadcast_to(np.asarray(params.pop(n, d), np.float32), rows) for n, d in floats.items()
    }
    arrays |= {n: np.broadcast_to(np.asarray(params.pop(n, d), np.int32), rows) for n, d in ints.items()}
    arrays["seed"] = np.broadcast_to(np.asarray(params.pop("seed", (0, 0)), np.int32), (rows, 2))
    assert not params
    slots = next((len(state) for state in (counts, bias, allowed, last) if state is not None), 1)
    return {
        **sample(
            logits=logits,
            token_counts=np.zeros((slots, V), np.int32) if counts is None else counts,
            last_tokens=np.zeros(slots, np.int32) if last is None else last,
            logit_bias=np.full((slots, V), np.nan, np.float32) if bias is None else bias,
            token_mask=pack_mask(np.zeros((slots, V), np.bool_) if allowed is None else allowed),
            **arrays,
        )
    }


def pack_mask(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """token_mask by its definition: bit v % 32 of word v / 32. [slots, V] -> [slots, V / 32]."""
    words = np.zeros((len(allowed), V // MASK_TOKENS), np.uint32)
    for slot, v in np.argwhere(allowed):
        words[slot, v // MASK_TOKENS] |= np.uint32(1) << np.uint32(v % MASK_TOKENS)
    return words.view(np.int32)


def test_philox_known_answers() -> None:
    """The vectors of Random123's kat_vectors for philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox4x32(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_exp_weights() -> None:
    """Within 3e-6 of exp where the weight has the bits to show it; exactly 2^40 at 0; 0 far below."""
    x = -np.linspace(0, 60, 100_001, dtype=np.float32)
    weights = exp_weights(x).astype(np.float64) * 2.0**-WEIGHT_BITS
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(weights, exact, rtol=3e-6, atol=2.0**-WEIGHT_BITS)
    assert exp_weights(np.zeros(1, np.float32))[0] == 1 << WEIGHT_BITS
    assert exp_weights(np.array([-np.inf, -29], np.float32)).tolist() == [0, 0]


def vllm_kept(logits: Float32, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """What vLLM keeps, by its own sequence of operations: min-p, then top-k, then top-p from the smallest up."""
    x = torch.from_numpy(logits.astype(np.float64))
    probabilities = x.softmax(-1)
    x = x.masked_fill(probabilities < min_p * probabilities.max(), -torch.inf)
    values, order = x.sort()
    if 0 < top_k < V:
        values = values.masked_fill(values < values[V - top_k], -torch.inf)
    dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[-1] = False
    values = values.masked_fill(dropped, -torch.inf)
    kept = torch.empty(V, dtype=torch.bool)
    kept[order] = values > -torch.inf
    return kept.numpy()


@pytest.mark.parametrize("top_k", [-1, 0, 1, 5, V, V + 1])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_filters_keep_what_vllm_keeps(top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(5):
        logits = random_logits(seed=seed)[0]
        weights = exp_weights(logits - logits.max())
        kept = keep_weights(logits, weights, top_k, top_p, min_p)
        assert ((kept > 0) == vllm_kept(logits, top_k, top_p, min_p) & (weights > 0)).all()
        assert (kept[kept > 0] == weights[kept > 0]).all()


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = np.zeros(V, np.float32)
    logits[:2] = 1
    weights = exp_weights(logits - 1)
    assert (keep_weights(logits, weights, top_k=3, top_p=1.0, min_p=0.0) > 0).all()
    assert (keep_weights(logits, weights, top_k=0, top_p=0.01, min_p=0.0) > 0).tolist() == [True] * 2 + [False] * (
        V - 2
    )


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws: each frequency within 5 standard deviations."""
    logits = random_logits(scale=1.0)[0]
    kept = keep_weights(logits, exp_weights(logits - logits.max()), 20, 0.9, 0.0)
    draws = np.bincount([draw_token(kept, (7, 9), i) for i in range(20_000)], minlength=V) / 20_000
    p = kept.astype(np.float64) / kept.sum()
    assert (np.abs(draws - p) <= 5 * np.sqrt(p * (1 - p) / 20_000) + 1e-12).all()


def test_temperature_scales_the_logits() -> None:
    logits = random_logits(seed=3)
    tokens = [
        run(np.repeat(x, 500, 0), temperature=t, seed=[(i, 1) for i in range(500)])["tokens"].tolist()
        for x, t in ((logits, 2.0), (logits / 2, 1.0))
    ]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 5


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-6])
def test_a_tiny_temperature_is_greedy_in_effect(temperature: float) -> None:
    logits = random_logits()
    assert run(logits, temperature=temperature)["tokens"] == logits.argmax()


def test_greedy_ties_go_to_the_lowest_index() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, [40, 7, 9]] = 2
    found = run(logits)
    assert found["tokens"].tolist() == [7]
    assert found["top_tokens"][0].tolist() == [7, 9, 40, *[i for i in range(V) if i not in (7, 9, 40)][:17]]


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    """Not on the row, the batch or the other requests."""
    logits = random_logits(scale=0.5)
    alone = [run(logits, temperature=1.0, seed=(5, 6), draw_index=i)["tokens"][0] for i in range(8)]
    together = run(np.repeat(logits, 8, 0), temperature=1.0, seed=(5, 6), draw_index=np.arange(8))["tokens"]
    assert together.tolist() == alone
    assert len(set(alone)) > 3
    other = run(np.repeat(logits, 8, 0), temperature=1.0, seed=(6, 5), draw_index=np.arange(8))["tokens"]
    assert other.tolist() != alone


def test_penalties_have_vllms_meaning() -> None:
    """Repetition counts prompt and output; presence and frequency only output."""
    logits = random_logits()[0]
    counts = np.zeros(V, np.int32)
    counts[3], counts[4], counts[5], counts[6] = PROMPT_FLAG, PROMPT_FLAG + 2, 3, 1
    expected = logits.astype(np.float64)
    for token, generated in ((3, 0), (4, 2), (5, 3), (6, 1)):
        expected[token] *= 1 / 1.3 if expected[token] > 0 else 1.3
        expected[token] -= 0.25 * generated + (0.5 if generated else 0)
    np.testing.assert_allclose(apply_penalties(logits, counts, 1.3, 0.5, 0.25), expected, rtol=1e-6, atol=1e-6)
    untouched = apply_penalties(logits, counts, 1.0, 0.0, 0.0)
    assert (untouched == logits).all()


@pytest.mark.parametrize("repetition", [1e-45, 1e-38, 1e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0])
def test_extreme_penalties_still_draw(repetition: float, temperature: float) -> None:
    counts = np.full((1, V), PROMPT_FLAG, np.int32)
    found = run(random_logits(), counts, sample_slot=0, repetition_penalty=repetition, temperature=temperature)
    assert 0 <= found["tokens"][0] < V


def test_counts_follow_the_draws() -> None:
    logits = random_logits(3)
    counts = np.zeros((2, V), np.int32)
    counts[1, :10] = PROMPT_FLAG
    tokens = run(logits, counts, sample_slot=[1, -1, 1])["tokens"]
    assert tokens.tolist() == logits.argmax(-1).tolist()
    expected = np.zeros((2, V), np.int32)
    expected[1, :10] = PROMPT_FLAG
    for token in tokens[[0, 2]]:
        expected[1, token] += 1
    assert (counts == expected).all()


def test_a_penalty_changes_the_next_draw() -> None:
    logits, counts = random_logits(), np.zeros((1, V), np.int32)
    order = np.argsort(-logits[0])
    drawn = [int(run(logits, counts, sample_slot=0, frequency_penalty=100.0)["tokens"][0]) for _ in range(5)]
    assert drawn == order[:5].tolist()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits, counts = random_logits(2), np.zeros((1, V), np.int32)
    counts[0, int(logits[0].argmax())] = 1
    found = run(logits, counts, temperature=0.1, top_k=1, sample_slot=0, presence_penalty=2.0)
    exact = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    for row in range(2):
        np.testing.assert_allclose(found["logprobs"][row], exact[row, found["tokens"][row]], rtol=1e-5)
        assert found["top_tokens"][row].tolist() == np.argsort(-logits[row])[:20].tolist()
        np.testing.assert_allclose(found["top_logprobs"][row], exact[row, found["top_tokens"][row]], rtol=1e-5)
    assert np.abs(log_softmax(logits[0]) - exact[0]).max() < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits, counts = random_logits(3), np.zeros((3, V), np.int32)
    logits[1, 5] = bad
    found = run(logits, counts, sample_slot=np.arange(3))
    assert found["tokens"].tolist() == [logits[0].argmax(), NO_TOKEN, logits[2].argmax()]
    assert np.isfinite(found["logprobs"]).tolist() == [True, False, True]
    assert found["top_tokens"][1].tolist() == [NO_TOKEN] * 20
    assert counts.sum(-1).tolist() == [1, 0, 1]


def test_a_large_vocabulary() -> None:
    """150,144 tokens of equal logits: the sum of weights neither overflows nor loses the last token."""
    weights = exp_weights(np.zeros(150_144, np.float32))
    drawn = [draw_token(weights, (1, i), 0) for i in range(200)]
    assert min(drawn) < 10_000 and max(drawn) > 140_000
    assert draw_token(np.array([0, 0, 5, 0], np.uint64), (1, 2), 3) == 2


# --- Bias, mask, forced tokens, last tokens ------------------------------------------------------------------------


def test_masks_unpack() -> None:
    allowed = np.random.default_rng(0).random((3, V)) < 0.5
    allowed[1], allowed[2] = True, False
    for words, wanted in zip(pack_mask(allowed), allowed, strict=True):
        assert (unpack_mask(words) == wanted).all()


def test_bias_is_added_before_the_penalties() -> None:
    """vLLM's order: a bias that changes a logit's sign changes what the repetition penalty does to it."""
    logits = np.full((1, V), -50, np.float32)
    logits[0, [3, 4]] = -1, 2.5
    bias, counts = np.zeros((1, V), np.float32), np.zeros((1, V), np.int32)
    bias[0, 3] = 5  # 4 / 2 = 2 < 2.5; penalised first it would be -2 + 5 = 3.
    counts[0, 3] = PROMPT_FLAG
    how = {"bias": bias, "sample_slot": 0, "sample_flags": USE_BIAS, "repetition_penalty": 2.0}
    assert run(logits, counts.copy(), **how)["tokens"] == 4
    assert run(logits, counts, **how | {"repetition_penalty": 1.0})["tokens"] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_has_the_bias_and_mask_of_its_slot(temperature: float) -> None:
    """And only if its flags say so: what the flags leave out would make the row draw nothing."""
    logits = np.tile(random_logits(), (6, 1))
    bias, allowed = np.zeros((2, V), np.float32), np.ones((2, V), np.bool_)
    bias[0, 7], bias[1, 9] = 100, 100
    allowed[0, 7] = allowed[1, 9] = False
    best = int(logits[0].argmax())
    assert best not in (7, 9)
    flags = [USE_BIAS, USE_BIAS, USE_BIAS | USE_MASK, USE_BIAS | USE_MASK, 0, USE_BIAS | USE_MASK]
    found = run(
        logits, bias=bias, allowed=allowed, sample_slot=[0, 1, 0, 1, 0, -1], sample_flags=flags,
        temperature=temperature, top_k=1,
    )  # fmt: skip
    assert found["tokens"].tolist() == [7, 9, best, best, best, best]
    alone = {"logits": logits[:1], "sample_slot": 0, "temperature": temperature, "top_k": 1}
    assert run(**alone, bias=bias, sample_flags=USE_BIAS)["tokens"] == 7
    assert run(**alone, allowed=allowed, sample_flags=USE_MASK)["tokens"] == best


@pytest.mark.parametrize("top_k", [0, 1, 3, 20, V])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_few_allowed_tokens(count: int, top_k: int) -> None:
    """Fewer than top_k, and the least likely: drawn by their probabilities among themselves, as vLLM would."""
    logits, draws = random_logits(scale=1.0), 4000
    chosen = np.argsort(logits[0])[:count]
    allowed = np.zeros((1, V), np.bool_)
    allowed[0, chosen] = True
    seeds = [(i, 5) for i in range(draws)]
    how = {"temperature": 1.0, "top_k": top_k, "sample_slot": 0, "seed": seeds}
    tokens = run(np.repeat(logits, draws, 0), allowed=allowed, sample_flags=USE_MASK, **how)["tokens"]
    kept = vllm_kept(np.where(allowed[0], logits[0], -np.inf).astype(np.float32), top_k, 1.0, 0.0) & allowed[0]
    p = np.where(kept, np.exp(logits[0].astype(np.float64)), 0)
    p /= p.sum()
    found = np.bincount(tokens, minlength=V) / draws
    assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / draws) + 1e-12).all()
    bias = np.where(allowed, 0, -np.inf).astype(np.float32)
    by_bias = run(np.repeat(logits, draws, 0), bias=bias, sample_flags=USE_BIAS, **how)["tokens"]
    assert by_bias.tolist() == tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_forbidden_draws_no_token(temperature: float) -> None:
    """By the mask, by the bias, by both together; the other rows go on."""
    logits, even = np.tile(random_logits(), (4, 1)), np.arange(V) % 2 == 0
    allowed = np.stack([even & ~even, even | True, even, even])
    bias = np.zeros((4, V), np.float32)
    bias[1], bias[2, even] = -np.inf, -np.inf
    counts, last = np.zeros((4, V), np.int32), np.full(4, 9, np.int32)
    found = run(
        logits, counts, bias=bias, allowed=allowed, last=last, sample_slot=np.arange(4), temperature=temperature,
        sample_flags=USE_BIAS | USE_MASK,
    )  # fmt: skip
    assert found["tokens"][:3].tolist() == [NO_TOKEN] * 3 and found["tokens"][3] % 2 == 0
    assert np.isnan(found["logprobs"]).tolist() == [True, True, True, False]
    assert counts.sum(-1).tolist() == [0, 0, 0, 1]
    assert last.tolist() == found["tokens"].tolist()


def test_extreme_bias() -> None:
    """What overflows is clamped, not forbidden; infinity wins; NaN ends the row unless it is forbidden."""
    logits = np.zeros((5, V), np.float32)
    logits[:, 0] = -3e38
    bias = np.full((5, V), -np.inf, np.float32)
    bias[0, 0] = -3e38
    bias[1] = 0
    bias[1, 3] = np.inf
    bias[2, 3] = bias[3, 3] = np.nan
    bias[3:, 4] = 1
    allowed = np.ones((5, V), np.bool_)
    allowed[3, 3] = False
    found = run(logits, bias=bias, allowed=allowed, sample_slot=np.arange(5), sample_flags=USE_BIAS | USE_MASK)
    assert found["tokens"].tolist() == [0, 3, NO_TOKEN, 4, 4]


def test_logprobs_ignore_bias_and_mask() -> None:
    logits = random_logits(2)
    allowed = np.ones((1, V), np.bool_)
    allowed[0, logits.argmax(-1)] = False
    bias = np.zeros((1, V), np.float32)
    bias[0, 5] = 50
    how = {"bias": bias, "allowed": allowed, "sample_slot": 0, "sample_flags": USE_BIAS | USE_MASK}
    plain, found = run(logits), run(logits, **how)
    assert found["tokens"].tolist() == [5, 5]
    for name in ("top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(found[name], plain[name])
    np.testing.assert_array_equal(found["logprobs"], [log_softmax(row)[5] for row in logits])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens(temperature: float) -> None:
    """Returned with their logprob, whatever the bias and mask; neither counted nor kept."""
    logits, counts, last = random_logits(4), np.zeros((1, V), np.int32), np.array([9], np.int32)
    logits[3, 0] = np.nan
    forced = [0, V - 1, 17, 17]
    found = run(
        logits, counts, last=last, forced_token=forced, sample_slot=0, sample_flags=USE_BIAS | USE_MASK,
        temperature=temperature, repetition_penalty=np.nan,
    )  # fmt: skip
    assert found["tokens"].tolist() == [0, V - 1, 17, NO_TOKEN]
    exact = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    np.testing.assert_allclose(found["logprobs"], exact[range(4), forced], rtol=1e-5)
    assert found["top_tokens"][0].tolist() == np.argsort(-logits[0])[:20].tolist()
    assert not counts.any() and last.tolist() == [9]


def test_last_tokens_follow_the_draws() -> None:
    """The last row of a slot stays; a row that is not finite leaves NO_TOKEN, one without a slot nothing."""
    logits, last = random_logits(6), np.full(4, 99, np.int32)
    logits[3, 0] = np.inf
    tokens = run(logits, last=last, sample_slot=[1, -1, 1, 2, 0, 0], forced_token=[-1, -1, -1, -1, -1, 5])["tokens"]
    assert last.tolist() == [tokens[4], tokens[2], NO_TOKEN, 99]
