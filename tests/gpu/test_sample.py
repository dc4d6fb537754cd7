"""Sample on the GPU against the numpy reference: the same tokens, alternatives and counts, bit for bit.

The draw is integer arithmetic on both sides (see reference_sample.py), so tokens are compared for equality. Only
logprobs are sums of floats: the reference adds 150,144 FP32 exponentials in another order, and 1e-4 is its own bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flint_plugins.ops import MAX_LOGPROBS
from flint_runtime.executors import reference_sample
from flint_runtime.executors.base import NO_TOKEN, PROMPT_FLAG

torch = pytest.importorskip("torch")
ops = pytest.importorskip("tests.gpu.ops")

pytestmark = pytest.mark.gpu

Inputs = dict[str, npt.NDArray[Any]]

FLINT, NANO = 150_144, 768
NEUTRAL = {
    "temperature": 1.0, "top_k": 20, "top_p": 0.95, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "sample_slot": -1,
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
MIXED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 50, "top_p": 1.0},
    {"top_k": -1},
    {"top_k": 0, "top_p": 1.0, "temperature": 1.7},
    {"top_k": 0, "top_p": 0.5, "min_p": 0.02},
    {"top_k": 256, "top_p": 0.999, "temperature": 3.0},
    {"top_k": 300, "top_p": 0.9, "temperature": 2.0},
    {"top_k": 1},
    {"top_p": 0.0},
    {"top_k": 2**31 - 1, "min_p": 1.0},
    {"temperature": 0.0, **PENALTIES},
    dict(PENALTIES),
    {"top_k": 0, **PENALTIES},
    {"top_k": 5000, "temperature": 5.0, "repetition_penalty": 0.7, "presence_penalty": -1.0},
]
"""Settings of a batch's rows, over NEUTRAL; those with penalties use a slot of their own."""


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> npt.NDArray[np.float32]:
    """Like a language model's: a bell curve and a few likely tokens."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, scale, (rows, vocabulary)).astype(np.float32)
    for row in logits:
        row[generator.integers(0, vocabulary, 30)] += generator.normal(8, 4, 30).astype(np.float32)
    return logits


def random_counts(slots: int, vocabulary: int, seed: int = 1) -> npt.NDArray[np.int32]:
    """Counts of which most are 0, some stand for a prompt, and some for generated tokens."""
    generator = np.random.default_rng(seed)
    generated = generator.integers(1, 5, (slots, vocabulary)) * (generator.random((slots, vocabulary)) < 0.02)
    prompt = PROMPT_FLAG * (generator.random((slots, vocabulary)) < 0.05)
    return (generated + prompt).astype(np.int32)


def make_inputs(
    logits: npt.NDArray[np.float32], settings: list[dict[str, Any]], counts: npt.NDArray[np.int32] | None = None
) -> Inputs:
    """The op's inputs: row r has settings[r % len(settings)] over NEUTRAL, the seed (r, 7) and the draw index 3 r."""
    rows = len(logits)
    if counts is None:
        counts = np.zeros((1, logits.shape[1]), np.int32)
    inputs: Inputs = {"logits": logits, "token_counts": counts}
    for name, default in NEUTRAL.items():
        dtype = np.int32 if isinstance(default, int) else np.float32
        inputs[name] = np.array([settings[r % len(settings)].get(name, default) for r in range(rows)], dtype)
    numbers = np.arange(rows, dtype=np.int32)
    return {**inputs, "seed": np.stack([numbers, np.full_like(numbers, 7)], 1), "draw_index": 3 * numbers}


def mixed_inputs(rows: int, vocabulary: int, first: int = 0) -> Inputs:
    """Rows with the MIXED settings from `first` on, each with a slot where it has penalties."""
    settings = [dict(MIXED[(first + r) % len(MIXED)]) for r in range(rows)]
    for row, setting in enumerate(settings):
        setting["sample_slot"] = row % 7 if row % 3 == 0 or "repetition_penalty" in setting else -1
    return make_inputs(random_logits(rows, vocabulary), settings, random_counts(7, vocabulary))


def on_gpu(inputs: Inputs) -> Inputs:
    """Run the op; the inputs stay as they are, the counts after the step are among the results."""
    tensors = {name: torch.from_numpy(array.copy()).cuda() for name, array in inputs.items()}
    return {name: tensor.cpu().numpy() for name, tensor in ops.run_op("Sample", {}, tensors).items()}


def expected(inputs: Inputs) -> Inputs:
    """What the reference says."""
    counts = inputs["token_counts"].copy()
    outputs = reference_sample.sample(**{**inputs, "token_counts": counts})
    return {**outputs, "token_counts_out": counts}


def check(inputs: Inputs) -> Inputs:
    """Compare the GPU with the reference; returns what the GPU says."""
    found, wanted = on_gpu(inputs), expected(inputs)
    for name in ("tokens", "top_tokens", "token_counts_out"):
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-4, equal_nan=True, err_msg=name)
    return found


def rows_of(inputs: Inputs, rows: list[int]) -> Inputs:
    """A batch of some of the rows."""
    return {name: array if name == "token_counts" else array[rows] for name, array in inputs.items()}


@pytest.mark.parametrize("first", range(len(MIXED)))
def test_one_row(first: int) -> None:
    check(mixed_inputs(1, FLINT, first))


@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(2, FLINT), (7, FLINT), (64, FLINT), (2, NANO), (7, NANO), (24, NANO), (64, NANO), (256, NANO), (1024, NANO)],
)
def test_batch(rows: int, vocabulary: int) -> None:
    check(mixed_inputs(rows, vocabulary))


@pytest.mark.parametrize("vocabulary", [20, 21, 127, 128, 130, 1001, 4097])
def test_odd_vocabulary(vocabulary: int) -> None:
    check(mixed_inputs(30, vocabulary))


def test_large_batch() -> None:
    """256 rows of the full vocabulary: some against the reference, all of them against smaller batches."""
    inputs = mixed_inputs(256, FLINT)
    found = on_gpu(inputs)
    some = list(range(0, 256, 16))
    wanted = expected(rows_of(inputs, some))
    np.testing.assert_array_equal(found["tokens"][some], wanted["tokens"])
    for start in range(0, 256, 32):
        part = on_gpu(rows_of(inputs, list(range(start, start + 32))))
        for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
            np.testing.assert_array_equal(found[name][start : start + 32], part[name], err_msg=name)


@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
def test_same_bits(vocabulary: int) -> None:
    """On repetition, and alone or in a batch."""
    inputs = mixed_inputs(2 * len(MIXED), vocabulary)
    first, again = on_gpu(inputs), on_gpu(inputs)
    alone = [on_gpu(rows_of(inputs, [row])) for row in range(2 * len(MIXED))]
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(first[name].view(np.int32), again[name].view(np.int32))
        separate = np.concatenate([outputs[name] for outputs in alone])
        np.testing.assert_array_equal(first[name].view(np.int32), separate.view(np.int32))


SHAPES = {
    "equal": lambda v: np.zeros(v),
    "two values": lambda v: np.arange(v) % 2.0,
    "three peaks": lambda v: np.where(np.isin(np.arange(v), [5, v // 2, v - 1]), 30.0, -30.0),
    "ascending": lambda v: np.linspace(-20, 20, v),
    "descending": lambda v: np.linspace(20, -20, v),
    "coarse": lambda v: np.round(np.random.default_rng(0).normal(0, 2, v)),
    "huge range": lambda v: np.random.default_rng(0).normal(0, 1, v) * 1e37,
    "tiny range": lambda v: 20 + np.random.default_rng(0).normal(0, 1, v) * 1e-5,
    "tiny": lambda v: np.random.default_rng(0).normal(0, 1, v) * 1e-40,
    "signed zeros": lambda v: np.where(np.arange(v) % 3 == 0, 0.0, -0.0),
    "one peak": lambda v: np.where(np.arange(v) == v - 2, 100.0, 0.0),
    "many at the top": lambda v: np.where(np.arange(v) < 600, 10.0, np.arange(v) / v),
}


@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, vocabulary: int) -> None:
    """Ties, order and range that the search for the best tokens must survive, with and without penalties."""
    logits = np.tile(SHAPES[shape](vocabulary).astype(np.float32), (len(MIXED), 1))
    settings = [{**setting, "sample_slot": 0} for setting in MIXED]
    found = check(make_inputs(logits, settings, random_counts(1, vocabulary)))
    assert found["tokens"][1] == logits[1].argmax(), "greedy: ties go to the lowest index"


def test_ties_of_top_k() -> None:
    """Tokens that equal the k-th are kept: with 600 of them, each must be drawn now and then."""
    logits = np.tile(SHAPES["many at the top"](NANO).astype(np.float32), (1024, 1))
    found = check(make_inputs(logits, [{"top_k": 20, "top_p": 1.0}]))
    assert found["tokens"].max() < 600 and len(set(found["tokens"])) > 400


@pytest.mark.parametrize("setting", [*MIXED[2:8], {"top_p": 1.0, "top_k": 0, "min_p": 0.3, "temperature": 4.0}])
def test_distribution(setting: dict[str, Any]) -> None:
    """16,384 draws from one row: only kept tokens, as often as their probabilities say (chi-square)."""
    row = random_logits(1, NANO)[0]
    counts = np.zeros(NANO)
    for step in range(16):
        inputs = make_inputs(np.tile(row, (1024, 1)), [setting])
        inputs["draw_index"] = np.full(1024, step, np.int32)
        counts += np.bincount(on_gpu(inputs)["tokens"], minlength=NANO)
    full = {**NEUTRAL, **setting}
    shifted = (row - row.max()) / np.float32(full["temperature"])
    weights = reference_sample.exp_weights(shifted)
    kept = reference_sample.keep_weights(row, weights, full["top_k"], full["top_p"], full["min_p"]).astype(np.float64)
    exact = np.exp(shifted.astype(np.float64))
    assert np.allclose(weights / 2.0**40, exact, rtol=1e-6, atol=1e-11), "the weights are the softmax"
    assert not counts[kept == 0].any()
    wanted = kept / kept.sum() * counts.sum()
    often = wanted >= 5
    rest = max(wanted[~often].sum(), 1e-9)
    statistic = ((counts - wanted) ** 2 / np.maximum(wanted, 1e-9))[often].sum()
    statistic += (counts[~often].sum() - rest) ** 2 / max(rest, 1)
    freedom = int(often.sum())
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4, (statistic, freedom)


def test_seeds() -> None:
    """The same seed and draw index draw the same; either one, and each of its words, changes the draw."""
    inputs = make_inputs(np.zeros((1024, NANO), np.float32), [{"top_k": 0, "top_p": 1.0}])
    inputs["draw_index"] = np.zeros(1024, np.int32)
    tokens = on_gpu(inputs)["tokens"]
    np.testing.assert_array_equal(tokens, on_gpu(inputs)["tokens"])
    for word in (0, 1):
        other = {**inputs, "seed": inputs["seed"].copy()}
        other["seed"][:, word] = np.arange(-1, -1025, -1)
        assert np.mean(check(other)["tokens"] == tokens) < 0.02
    later = {**inputs, "draw_index": np.full(1024, -(2**31), np.int32)}
    assert np.mean(check(later)["tokens"] == tokens) < 0.02


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
def test_not_finite(value: float, vocabulary: int) -> None:
    """One bad logit ends its row, is counted nowhere, and leaves the other rows as they were."""
    inputs = mixed_inputs(len(MIXED), vocabulary)
    clean = on_gpu(inputs)
    bad = list(range(0, len(MIXED), 2))
    for place, row in enumerate(bad):
        inputs["logits"][row, [0, vocabulary - 1, vocabulary // 2][place % 3]] = value
    found = check(inputs)
    others = [row for row in range(len(MIXED)) if row not in bad]
    assert (found["tokens"][bad] == NO_TOKEN).all() and np.isnan(found["logprobs"][bad]).all()
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(found[name][others], clean[name][others], err_msg=name)


def test_penalties_that_overflow() -> None:
    """Logits that a tiny repetition penalty makes infinite are clamped; a penalty that is NaN ends its row only."""
    settings = [{**MIXED[i], "repetition_penalty": r, "sample_slot": 0} for i in (0, 1, 3, 7) for r in (1e-39, np.nan)]
    found = check(make_inputs(random_logits(len(settings), NANO), settings, random_counts(1, NANO)))
    assert (found["tokens"][::2] != NO_TOKEN).all() and (found["tokens"][1::2] == NO_TOKEN).all()


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {}, {"top_k": 0}])
def test_counts(setting: dict[str, Any]) -> None:
    """Step by step: a presence penalty drives out its token, the slot -1 counts nothing, prompts keep their flag."""
    slots = [2, 0, -1, 2]
    logits = random_logits(4, NANO)
    settings = [{**setting, "presence_penalty": 50.0, "sample_slot": slot} for slot in slots]
    counts = np.full((3, NANO), PROMPT_FLAG, np.int32)
    for step in range(5):
        inputs = make_inputs(logits, settings, counts)
        found = check(inputs)
        counts = found["token_counts_out"]
        assert (counts & (PROMPT_FLAG - 1)).sum(axis=1).tolist() == [step + 1, 0, 2 * (step + 1)]
        assert (counts & PROMPT_FLAG).all()
    assert (counts[0] & (PROMPT_FLAG - 1)).max() == 1


def test_shared_slot() -> None:
    """Rows that share a slot see the counts from before the step, and are all counted."""
    logits = np.tile(random_logits(1, FLINT), (64, 1))
    settings = [{"temperature": 0.0, **PENALTIES, "sample_slot": 0}, {"top_k": 0, **PENALTIES, "sample_slot": 0}]
    counts = random_counts(1, FLINT)
    found = check(make_inputs(logits, settings, counts))
    assert (found["token_counts_out"] - counts).sum() == 64
    assert len(set(found["tokens"][::2])) == 1


def test_wrong_slot() -> None:
    """A slot that does not exist ends the row."""
    inputs = make_inputs(
        random_logits(3, NANO), [{**PENALTIES, "sample_slot": slot} for slot in (0, 2, 1)], random_counts(2, NANO)
    )
    found = on_gpu(inputs)
    assert found["tokens"][1] == NO_TOKEN and (found["top_tokens"][1] == NO_TOKEN).all()
    assert (found["tokens"][[0, 2]] != NO_TOKEN).all()
    assert (found["token_counts_out"] - inputs["token_counts"]).sum() == 2


def test_alternatives_without_penalties() -> None:
    """The alternatives and logprobs are those of the raw logits, whatever the penalties and filters."""
    logits = random_logits(2, FLINT)
    plain = on_gpu(make_inputs(logits, [{"top_k": 0, "top_p": 1.0}]))
    found = on_gpu(make_inputs(logits, [{**PENALTIES, "sample_slot": 0}], random_counts(1, FLINT)))
    assert found["top_tokens"].shape == (2, MAX_LOGPROBS)
    np.testing.assert_array_equal(found["top_tokens"], plain["top_tokens"])
    np.testing.assert_array_equal(found["top_logprobs"], plain["top_logprobs"])
    best = torch.from_numpy(logits).double().log_softmax(-1).topk(MAX_LOGPROBS).values
    np.testing.assert_allclose(found["top_logprobs"], best.numpy(), rtol=0, atol=1e-4)
