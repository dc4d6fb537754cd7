"""Sample on the GPU against the numpy reference: the same tokens, alternatives and states, bit for bit.

The draw is integer arithmetic on both sides (see reference_sample.py), so tokens are compared for equality. Only
logprobs are sums of floats: the reference adds 150,144 FP32 exponentials in another order, and 1e-4 is its own bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flint_plugins.ops import MASK_TOKENS, MAX_LOGPROBS, USE_BIAS, USE_MASK
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
    "forced_token": -1, "sample_flags": 0,
}  # fmt: skip
STATES = ("token_counts", "last_tokens", "logit_bias", "token_mask")
CHANGED = ("token_counts_out", "last_tokens_out")
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
    {"sample_flags": USE_BIAS},
    {"sample_flags": USE_MASK, "temperature": 0.0},
    {"sample_flags": USE_MASK},
    {"sample_flags": USE_BIAS, "top_k": 0},
    {"sample_flags": USE_BIAS | USE_MASK, "top_k": 300, "temperature": 2.0},
    {"sample_flags": USE_BIAS | USE_MASK, **PENALTIES},
    {"forced_token": 11, "sample_flags": USE_BIAS | USE_MASK, "top_k": 0, **PENALTIES},
]
"""Settings of a batch's rows, over NEUTRAL; those with penalties, bias or mask use a slot of their own."""


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


def pack_mask(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The words of token_mask: [slots, V] bool -> [slots, V / 32]."""
    bits = allowed.reshape(len(allowed), -1, MASK_TOKENS).astype(np.uint32)
    return (bits << np.arange(MASK_TOKENS, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def random_states(slots: int, vocabulary: int, seed: int = 2) -> Inputs:
    """Random counts, a bias on a tenth of the tokens that forbids some of them, a mask that allows a third."""
    generator = np.random.default_rng(seed)
    shape = slots, vocabulary
    bias = np.where(generator.random(shape) < 0.1, generator.normal(0, 6, shape), 0).astype(np.float32)
    bias[generator.random(shape) < 0.01] = -np.inf
    return {
        "token_counts": random_counts(slots, vocabulary, seed),
        "logit_bias": bias,
        "token_mask": pack_mask(generator.random(shape) < 1 / 3),
    }


def make_inputs(
    logits: npt.NDArray[np.float32], settings: list[dict[str, Any]], states: Inputs | None = None
) -> Inputs:
    """The op's inputs: row r has settings[r % len(settings)] over NEUTRAL, the seed (r, 7) and the draw index 3 r.

    Of the states, what is not given must not be used: a bias of NaN, a mask that forbids every token.
    """
    rows, vocabulary = logits.shape
    states = states or {}
    slots = len(next(iter(states.values()))) if states else 1
    inputs: Inputs = {
        "logits": logits,
        "token_counts": np.zeros((slots, vocabulary), np.int32),
        "last_tokens": np.full(slots, 4711, np.int32),
        "logit_bias": np.full((slots, vocabulary), np.nan, np.float32),
        "token_mask": np.zeros((slots, vocabulary // MASK_TOKENS), np.int32),
        **states,
    }
    for name, default in NEUTRAL.items():
        dtype = np.int32 if isinstance(default, int) else np.float32
        inputs[name] = np.array([settings[r % len(settings)].get(name, default) for r in range(rows)], dtype)
    numbers = np.arange(rows, dtype=np.int32)
    return {**inputs, "seed": np.stack([numbers, np.full_like(numbers, 7)], 1), "draw_index": 3 * numbers}


def mixed_inputs(rows: int, vocabulary: int, first: int = 0) -> Inputs:
    """Rows with the MIXED settings from `first` on, each with a slot where it needs one, and some others."""
    settings = [dict(MIXED[(first + r) % len(MIXED)]) for r in range(rows)]
    for row, setting in enumerate(settings):
        needed = "repetition_penalty" in setting or "sample_flags" in setting
        setting["sample_slot"] = row % 7 if row % 3 == 0 or needed else -1
    return make_inputs(random_logits(rows, vocabulary), settings, random_states(7, vocabulary))


def on_gpu(inputs: Inputs) -> Inputs:
    """Run the op; the inputs stay as they are, the counts after the step are among the results."""
    tensors = {name: torch.from_numpy(array.copy()).cuda() for name, array in inputs.items()}
    return {name: tensor.cpu().numpy() for name, tensor in ops.run_op("Sample", {}, tensors).items()}


def expected(inputs: Inputs) -> Inputs:
    """What the reference says."""
    counts, last = inputs["token_counts"].copy(), inputs["last_tokens"].copy()
    outputs = reference_sample.sample(**{**inputs, "token_counts": counts, "last_tokens": last})
    return {**outputs, "token_counts_out": counts, "last_tokens_out": last}


def check(inputs: Inputs) -> Inputs:
    """Compare the GPU with the reference; returns what the GPU says."""
    found, wanted = on_gpu(inputs), expected(inputs)
    for name in ("tokens", "top_tokens", *CHANGED):
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-4, equal_nan=True, err_msg=name)
    return found


def rows_of(inputs: Inputs, rows: list[int]) -> Inputs:
    """A batch of some of the rows."""
    return {name: array if name in STATES else array[rows] for name, array in inputs.items()}


@pytest.mark.parametrize("first", range(len(MIXED)))
def test_one_row(first: int) -> None:
    check(mixed_inputs(1, FLINT, first))


@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(2, FLINT), (7, FLINT), (64, FLINT), (2, NANO), (7, NANO), (24, NANO), (64, NANO), (256, NANO), (1024, NANO)],
)
def test_batch(rows: int, vocabulary: int) -> None:
    check(mixed_inputs(rows, vocabulary))


@pytest.mark.parametrize("vocabulary", [32, 64, 96, 128, 160, 992, 4128])
def test_vocabularies_of_no_whole_groups(vocabulary: int) -> None:
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
    found = check(make_inputs(logits, settings, random_states(1, vocabulary)))
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
    found = check(make_inputs(random_logits(len(settings), NANO), settings, random_states(1, NANO)))
    assert (found["tokens"][::2] != NO_TOKEN).all() and (found["tokens"][1::2] == NO_TOKEN).all()


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {}, {"top_k": 0}])
def test_counts(setting: dict[str, Any]) -> None:
    """Step by step: a presence penalty drives out its token, the slot -1 counts nothing, prompts keep their flag."""
    slots = [2, 0, -1, 2]
    logits = random_logits(4, NANO)
    settings = [{**setting, "presence_penalty": 50.0, "sample_slot": slot} for slot in slots]
    counts = np.full((3, NANO), PROMPT_FLAG, np.int32)
    for step in range(5):
        found = check(make_inputs(logits, settings, {"token_counts": counts}))
        counts = found["token_counts_out"]
        assert (counts & (PROMPT_FLAG - 1)).sum(axis=1).tolist() == [step + 1, 0, 2 * (step + 1)]
        assert (counts & PROMPT_FLAG).all()
    assert (counts[0] & (PROMPT_FLAG - 1)).max() == 1


def test_shared_slot() -> None:
    """Rows that share a slot see the counts from before the step, and are all counted."""
    logits = np.tile(random_logits(1, FLINT), (64, 1))
    settings = [{"temperature": 0.0, **PENALTIES, "sample_slot": 0}, {"top_k": 0, **PENALTIES, "sample_slot": 0}]
    states = random_states(1, FLINT)
    found = check(make_inputs(logits, settings, states))
    assert (found["token_counts_out"] - states["token_counts"]).sum() == 64
    assert len(set(found["tokens"][::2])) == 1


def test_wrong_slot() -> None:
    """A slot that does not exist ends the row."""
    inputs = make_inputs(
        random_logits(3, NANO), [{**PENALTIES, "sample_slot": slot} for slot in (0, 2, 1)], random_states(2, NANO)
    )
    found = on_gpu(inputs)
    assert found["tokens"][1] == NO_TOKEN and (found["top_tokens"][1] == NO_TOKEN).all()
    assert (found["tokens"][[0, 2]] != NO_TOKEN).all()
    assert (found["token_counts_out"] - inputs["token_counts"]).sum() == 2


def test_alternatives_are_of_the_raw_logits() -> None:
    """Alternatives and logprobs stay the same, whatever the bias, mask, penalties and filters."""
    logits = random_logits(2, FLINT)
    plain = on_gpu(make_inputs(logits, [{"top_k": 0, "top_p": 1.0}]))
    adjusted = {**PENALTIES, "sample_flags": USE_BIAS | USE_MASK, "sample_slot": 0}
    found = on_gpu(make_inputs(logits, [adjusted], random_states(1, FLINT)))
    assert found["top_tokens"].shape == (2, MAX_LOGPROBS)
    np.testing.assert_array_equal(found["top_tokens"], plain["top_tokens"])
    np.testing.assert_array_equal(found["top_logprobs"], plain["top_logprobs"])
    best = torch.from_numpy(logits).double().log_softmax(-1).topk(MAX_LOGPROBS).values
    np.testing.assert_allclose(found["top_logprobs"], best.numpy(), rtol=0, atol=1e-4)


# --- Bias and mask ------------------------------------------------------------------------------------------------

DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"top_k": 256, "top_p": 1.0}, {"top_k": 300, "temperature": 4.0}, {"top_k": 0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.1}, {"top_k": 1}, {"temperature": 0.0, **PENALTIES}, {**PENALTIES},
]  # fmt: skip
"""A row of every path through the kernels: greedy, a list, a scan, each with penalties or without."""


@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
@pytest.mark.parametrize("flags", [USE_BIAS, USE_MASK, USE_BIAS | USE_MASK])
def test_bias_and_mask(flags: int, vocabulary: int) -> None:
    """Every path, with a slot of its own per row."""
    rows = 2 * len(DRAWS)
    settings = [{**DRAWS[r % len(DRAWS)], "sample_flags": flags, "sample_slot": rows - 1 - r} for r in range(rows)]
    states = random_states(rows, vocabulary)
    tokens = check(make_inputs(random_logits(rows, vocabulary), settings, states))["tokens"]
    for row, token in enumerate(tokens):
        slot = rows - 1 - row
        assert not flags & USE_BIAS or states["logit_bias"][slot, token] > -np.inf
        assert not flags & USE_MASK or reference_sample.unpack_mask(states["token_mask"][slot])[token]


@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 300, 600])
@pytest.mark.parametrize("where", ["unlikely", "neighbours", "spread"])
@pytest.mark.parametrize("how", [USE_BIAS, USE_MASK])
def test_few_allowed(how: int, where: str, count: int, vocabulary: int) -> None:
    """A grammar often allows few tokens, and the model need not like them: fewer than top_k, far down, in one group."""
    logits = random_logits(1, vocabulary, seed=count)
    chosen = {
        "unlikely": np.argsort(logits[0])[:count],
        "neighbours": np.arange(count) + (vocabulary - count) // 2,
        "spread": np.linspace(0, vocabulary - 1, count).astype(np.int64),
    }[where]
    allowed = np.zeros((1, vocabulary), np.bool_)
    allowed[0, chosen] = True
    states = {
        "token_counts": random_counts(1, vocabulary),
        "logit_bias": np.where(allowed & (how == USE_BIAS), -3, -np.inf).astype(np.float32),
        "token_mask": pack_mask(allowed),
    }
    settings = [{**setting, "sample_flags": how, "sample_slot": 0} for setting in DRAWS]
    found = check(make_inputs(np.tile(logits, (len(DRAWS), 1)), settings, states))
    assert allowed[0, found["tokens"]].all()


def test_equal_logits_under_a_mask() -> None:
    """More equal tokens than a list holds, among them forbidden ones."""
    allowed = np.random.default_rng(0).random((1, FLINT)) < 0.5
    settings = [{**setting, "sample_flags": USE_MASK, "sample_slot": 0} for setting in DRAWS[:6]]
    found = check(make_inputs(np.zeros((6, FLINT), np.float32), settings, {"token_mask": pack_mask(allowed)}))
    assert allowed[0, found["tokens"]].all()
    assert found["tokens"][0] == allowed[0].argmax(), "greedy: ties go to the lowest index"


@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
@pytest.mark.parametrize("how", ["mask", "bias", "both"])
def test_everything_forbidden(how: str, vocabulary: int) -> None:
    """The row draws NO_TOKEN, which last_tokens keeps and no count does; the other rows are as without it."""
    even = np.arange(vocabulary) % 2 == 0
    allowed = {"mask": ~even & even, "bias": even | True, "both": even}[how]
    bias = {"mask": np.zeros(vocabulary), "bias": np.full(vocabulary, -np.inf), "both": np.where(even, -np.inf, 1)}[how]
    states = random_states(2, vocabulary)
    states["token_mask"][1], states["logit_bias"][1] = pack_mask(allowed[None])[0], bias
    settings = [
        {**setting, "sample_flags": USE_BIAS | USE_MASK, "sample_slot": slot} for setting in DRAWS for slot in (0, 1)
    ]
    inputs = make_inputs(random_logits(len(settings), vocabulary), settings, states)
    found = check(inputs)
    assert (found["tokens"][1::2] == NO_TOKEN).all() and (found["tokens"][::2] != NO_TOKEN).all()
    assert np.isnan(found["logprobs"][1::2]).all() and (found["top_tokens"][1::2] == NO_TOKEN).all()
    assert found["last_tokens_out"].tolist() == [found["tokens"][-2], NO_TOKEN]
    np.testing.assert_array_equal(found["token_counts_out"][1], states["token_counts"][1])
    others = on_gpu(rows_of(inputs, list(range(0, len(settings), 2))))
    np.testing.assert_array_equal(found["tokens"][::2], others["tokens"])


@pytest.mark.parametrize("value", [np.inf, 3e38, -3e38, 1e-45, np.nan])
def test_extreme_bias(value: float) -> None:
    """Sums that overflow are clamped, so that the token is the likeliest or the least likely; NaN ends the row."""
    logits = 1e38 * random_logits(len(DRAWS), NANO, scale=0.5)
    bias = np.zeros((1, NANO), np.float32)
    bias[0, ::50] = value
    states = {"token_counts": random_counts(1, NANO), "logit_bias": bias}
    settings = [{**setting, "sample_flags": USE_BIAS, "sample_slot": 0} for setting in DRAWS]
    found = check(make_inputs(np.clip(logits, -3e38, 3e38), settings, states))
    assert ((found["tokens"] == NO_TOKEN) == np.isnan(value)).all()
    if value == np.inf:
        assert found["tokens"][0] % 50 == 0


def test_flags_need_a_slot() -> None:
    """Without a slot there is no bias and no mask: the row is as without flags, and nothing is read."""
    logits = random_logits(len(DRAWS), NANO)
    plain = check(make_inputs(logits, DRAWS))
    flagged = on_gpu(make_inputs(logits, [{**setting, "sample_flags": USE_BIAS | USE_MASK} for setting in DRAWS]))
    np.testing.assert_array_equal(flagged["tokens"], plain["tokens"])


# --- Forced tokens and last tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [NANO, FLINT])
def test_forced_tokens(vocabulary: int) -> None:
    """Their logprob by the raw logits, whatever else the row asks for; no state changes."""
    forced = [0, vocabulary - 1, *np.random.default_rng(0).integers(0, vocabulary, len(DRAWS) - 2).tolist()]
    settings = [
        {**setting, "forced_token": token, "sample_flags": USE_BIAS | USE_MASK, "sample_slot": row % 2}
        for row, (setting, token) in enumerate(zip(DRAWS, forced, strict=True))
    ]
    logits = random_logits(len(DRAWS), vocabulary)
    states = {"token_counts": random_counts(2, vocabulary)}  # Bias and mask would end every row.
    inputs = make_inputs(logits, settings, states)
    found = check(inputs)
    assert found["tokens"].tolist() == forced
    exact = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    np.testing.assert_allclose(found["logprobs"], exact[range(len(forced)), forced], rtol=0, atol=1e-4)
    for name in ("token_counts", "last_tokens"):
        np.testing.assert_array_equal(found[f"{name}_out"], inputs[name])


def test_a_forced_token_outside_the_vocabulary() -> None:
    """It ends its row, and reads nothing."""
    found = on_gpu(make_inputs(random_logits(3, NANO), [{"forced_token": token} for token in (5, NANO, 2**31 - 1)]))
    assert found["tokens"].tolist() == [5, NO_TOKEN, NO_TOKEN] and np.isnan(found["logprobs"][1:]).all()


@pytest.mark.parametrize("rows", [1, 3, 31, 33, 100])
def test_last_tokens(rows: int) -> None:
    """Each slot keeps the token of the last row that has it; rows without a slot, and forced ones, leave none."""
    slots = np.random.default_rng(rows).integers(-1, 8, rows).tolist()
    settings = [{**MIXED[r % 3], "sample_slot": slot} for r, slot in enumerate(slots)]
    settings[-1]["forced_token"] = 3 if rows > 1 else -1
    found = check(make_inputs(random_logits(rows, NANO), settings, {"token_counts": np.zeros((8, NANO), np.int32)}))
    wanted = [4711] * 8
    for setting, token in zip(settings, found["tokens"].tolist(), strict=True):
        if setting["sample_slot"] >= 0 and setting.get("forced_token", -1) < 0:
            wanted[setting["sample_slot"]] = token
    assert found["last_tokens_out"].tolist() == wanted
