"""The reference executor against transformers, and against itself however a prompt is cut into steps.

Against transformers the rule of the design's numerics holds: within 2x the error that transformers' own BF16 run shows
against its FP32 run, and the same arg-max wherever the FP32 margin exceeds that error. The error is the largest
over a model's prompts, and per prompt its root mean square. For NVFP4 transformers gets the dequantised weights in
FP32; its BF16 run rounds them once more, so it is the error scale, not the expectation.

Against itself the logits agree within SELF_TOLERANCE: sums are FP64 rounded to FP32, so the way tokens are batched can
only move a sum by one FP32 step, once in about 10^8, and a BF16 rounding behind it even more rarely.

Every pool starts as NaN (K5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from flint_plugins.ops import SchemaError
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.manifest import Limits
from tests.runtime.engines import Place, build_reference_engine, feed, open_poisoned, poison, run_logits
from tests.runtime.oracle import Expected, expect, largest_error, parity, read_state
from tests.shapes import NANO, NANO_DIRECTORY
from tests.tools.checkpoints import flint_config, random_checkpoint
from tests.tools.nano_data import chat_template, held_out_samples, render_prompt

SELF_TOLERANCE = 1e-5
WINDOW = NANO.sliding_window
LENGTHS = (WINDOW, WINDOW + 1, 2 * WINDOW + 5, 3 * WINDOW)
LIMITS = Limits(max_batch=4, max_context=256, prefill_chunk=256)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small matrices: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if "real_widths" in request.node.name else 1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Case:
    """An engine with prompts and what transformers says about them."""

    engine: Path
    executor: ReferenceExecutor
    prompts: list[list[int]]
    expected: list[Expected]
    own_error: float
    """Largest error of transformers' BF16 run over the prompts."""


def make_case(checkpoint: Path, config_directory: Path, directory: Path, prompts: list[list[int]]) -> Case:
    """Build the engine, and run transformers."""
    engine = build_reference_engine(checkpoint, directory, LIMITS, config_directory)
    expected = expect(config_directory, read_state(checkpoint), prompts)
    return Case(engine, open_poisoned(engine, 4), prompts, expected, largest_error(expected))


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A random model of flint-nano's shape."""
    directory = tmp_path_factory.mktemp(request.param)
    config = flint_config(
        layers=NANO.num_hidden_layers, hidden=NANO.hidden_size, experts=NANO.num_experts,
        heads=NANO.num_attention_heads, kv_heads=NANO.num_key_value_heads, head_dim=NANO.head_dim,
        intermediate=NANO.intermediate_size, moe_intermediate=NANO.moe_intermediate_size,
        shared_intermediate=NANO.shared_expert_intermediate_size, vocab=NANO.vocab_size, window=WINDOW, context=4096,
    )  # fmt: skip
    path = directory / "model.gguf" if request.param == "nvfp4" else directory / "model"
    checkpoint = random_checkpoint(path, config, request.param, seed=1)
    random = np.random.default_rng(2)
    prompts = [random.integers(0, NANO.vocab_size, n).tolist() for n in LENGTHS]
    config_directory = directory if request.param == "nvfp4" else checkpoint
    return make_case(checkpoint, config_directory, directory / "engine", prompts)


def fresh(case: Case) -> ReferenceExecutor:
    """The case's executor with all its KV poisoned again."""
    poison(case.executor)
    return case.executor


def test_logits_are_as_close_as_transformers_own(case: Case) -> None:
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        executor = fresh(case)
        result = parity(feed(executor, Place(executor), prompt, len(prompt)), expected, case.own_error)
        assert result.holds, (len(prompt), result)


@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
def test_chunks_change_nothing(case: Case, chunk: int) -> None:
    """K2."""
    prompt = case.prompts[-1]
    executor = fresh(case)
    whole = feed(executor, Place(executor), prompt, len(prompt))
    poison(executor)
    cut = feed(executor, Place(executor), prompt, chunk)
    np.testing.assert_allclose(cut, whole, atol=SELF_TOLERANCE, rtol=0)
    assert (cut.argmax(-1) == whole.argmax(-1)).all()


@pytest.mark.parametrize(("prefilled", "chunk"), [(0, 1), (0, 8), (1, 1), (WINDOW + 3, 1), (2 * WINDOW, 5)])
def test_decode_equals_prefill(case: Case, prefilled: int, chunk: int) -> None:
    """Tokens fed one by one, or several at once as for proposed tokens, give the logits of the whole prefill."""
    prompt = case.prompts[-1]
    executor = fresh(case)
    whole = feed(executor, Place(executor), prompt, len(prompt))
    poison(executor)
    place = Place(executor)
    first = [feed(executor, place, prompt[:prefilled], prefilled)] if prefilled else []
    cut = np.concatenate([*first, feed(executor, place, prompt[prefilled:], chunk, "decode")])
    np.testing.assert_allclose(cut, whole, atol=SELF_TOLERANCE, rtol=0)
    assert (cut.argmax(-1) == whole.argmax(-1)).all()


def test_ragged_batch_equals_single_runs(case: Case) -> None:
    """Sequences of different lengths share prefill and decode steps, joining at different times."""
    executor = fresh(case)
    singles = []
    for prompt in case.prompts:
        singles.append(feed(executor, Place(executor), prompt, len(prompt)))
        poison(executor)
    places = [Place(executor, i) for i in range(len(case.prompts))]
    cut = [len(p) - 4 - i for i, p in enumerate(case.prompts)]
    found: list[list[np.ndarray]] = [[] for _ in places]

    def step(phase: str, pieces: dict[int, list[int]]) -> None:
        parts = [places[i].part(piece, range(len(piece))) for i, piece in pieces.items()]
        logits = run_logits(executor, "prefill" if phase == "prefill" else "decode", parts)
        for i, piece in pieces.items():
            found[i].append(logits[: len(piece)])
            logits = logits[len(piece) :]

    step("prefill", {0: case.prompts[0][: cut[0]], 2: case.prompts[2][:7]})
    step("prefill", {2: case.prompts[2][7 : cut[2]], 1: case.prompts[1][: cut[1]], 3: case.prompts[3][: cut[3]]})
    for token in range(3):
        step("decode", {i: [case.prompts[i][cut[i] + token]] for i in (3, 1, 0, 2)})
    # Later ones as several tokens at once, of different number.
    step("decode", {i: case.prompts[i][cut[i] + 3 :][:2] for i in (0, 3)})
    for i, logits in enumerate(found):
        joined = np.concatenate(logits)
        np.testing.assert_allclose(joined, singles[i][: len(joined)], atol=SELF_TOLERANCE, rtol=0)


def test_window_off_by_one_fails(case: Case) -> None:
    """The parity test sees a window that is one too long or too short (K1)."""
    for wrong in (WINDOW - 1, WINDOW + 1):
        executor = open_poisoned(case.engine)
        change_fields(executor, "SinkAttention", window=wrong)
        logits = feed(executor, Place(executor), case.prompts[-1], len(case.prompts[-1]))
        whole = feed(fresh(case), Place(case.executor), case.prompts[-1], len(case.prompts[-1]))
        before = WINDOW if wrong > WINDOW else WINDOW - 1
        np.testing.assert_allclose(logits[:before], whole[:before], atol=SELF_TOLERANCE, rtol=0)
        assert (np.abs(logits[before:] - whole[before:]).max(-1) > 0.01).all()


def change_fields(executor: ReferenceExecutor, op: str, **fields: int) -> None:
    """Change a field of every sliding node of an op."""
    for graph in executor._graphs.values():
        for node in graph.nodes:
            if node.op.name == op and node.fields["attention"] == "sliding":
                node.fields.update(fields)


def test_rope_must_be_on_the_sliding_layers(case: Case) -> None:
    """K6: without RoPE on the sliding layers parity fails."""
    prompt, expected = case.prompts[-1], case.expected[-1]
    executor = open_poisoned(case.engine)
    half = NANO.head_dim // 2
    executor._weights["rope"][:, :half], executor._weights["rope"][:, half:] = 1, 0
    assert not parity(feed(executor, Place(executor), prompt, len(prompt)), expected, case.own_error).holds


def test_rope_on_full_layers_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6: RoPE applied to the full layers, too, breaks parity."""
    from flint_runtime.executors import reference_ops

    executor = open_poisoned(case.engine)
    plain = reference_ops.norm_qkv_rope

    def everywhere(fields: reference_ops.Fields, t: reference_ops.Tensors, cache: object) -> dict[str, torch.Tensor]:
        return plain(fields, {**t, "rope": executor._weights["rope"]}, cache)  # type: ignore[arg-type]

    monkeypatch.setitem(reference_ops.REFERENCE_OPS, "NormQkvRope", everywhere)
    prompt, expected = case.prompts[-1], case.expected[-1]
    assert not parity(feed(executor, Place(executor), prompt, len(prompt)), expected, case.own_error).holds


def test_schema_error_names_the_node(case: Case) -> None:
    executor = open_poisoned(case.engine)
    executor._weights["layers.2.attn.q_norm"] = torch.ones(64)
    with pytest.raises(SchemaError, match=r"layers\.2\.attn\.qkv.*q_norm"):
        feed(executor, Place(executor), [1, 2, 3], 3)


# --------------------------------------------------------------------------------------------------------- flint-nano

NANO_CHECKPOINTS = sorted({*NANO_DIRECTORY.glob("*.gguf"), *(p.parent for p in NANO_DIRECTORY.glob("*.safetensors"))})


@pytest.mark.parametrize("checkpoint", NANO_CHECKPOINTS, ids=lambda path: path.name)
def test_flint_nano(checkpoint: Path, tmp_path: Path) -> None:
    """The trained model on its own kind of prompt: parity, and decode equal to prefill."""
    from flint_runtime.tokenizer import Tokenizer

    tokenizer, render = Tokenizer(NANO_DIRECTORY), chat_template()
    prompts = [tokenizer.encode(render_prompt(render, drawn)) for drawn in held_out_samples(0, 12)]
    prompts = [p[: LIMITS.max_context] for p in prompts]
    nano = make_case(checkpoint, NANO_DIRECTORY, tmp_path / "engine", prompts)
    for prompt, expected in zip(nano.prompts, nano.expected, strict=True):
        whole = feed(fresh(nano), Place(nano.executor), prompt, len(prompt))
        result = parity(whole, expected, nano.own_error)
        assert result.holds, result
        poison(nano.executor)
        place, end = Place(nano.executor), len(prompt) - 6
        feed(nano.executor, place, prompt[:end], len(prompt))
        decoded = feed(nano.executor, place, prompt[end:], 1, "decode")
        np.testing.assert_allclose(decoded, whole[end:], atol=SELF_TOLERANCE, rtol=0)


# -------------------------------------------------------------------------------------------------------- real widths


def test_real_widths(tmp_path: Path) -> None:
    """Hidden 2048, 32 query and 4 KV heads, window 513, NVFP4: a prompt that runs past the window, prefilled in chunks
    of window + 1 and the rest, then decoded."""
    window = 513
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = flint_config(
        layers=4, experts=16, vocab=1024, context=1024, window=window, layer_types=kinds, mlp_only_layers=[0]
    )
    checkpoint = random_checkpoint(tmp_path / "model.gguf", config, "nvfp4", seed=3)
    limits = Limits(max_batch=4, max_context=1024, prefill_chunk=1024)
    engine = build_reference_engine(checkpoint, tmp_path / "engine", limits, tmp_path)
    prompt = np.random.default_rng(0).integers(0, 1024, window + 12).tolist()
    expected = expect(tmp_path, read_state(checkpoint), [prompt])[0]
    executor = open_poisoned(engine)
    place, end = Place(executor), len(prompt) - 4
    # A prefill step returns at most 512 rows of logits.
    first = run_logits(executor, "prefill", [place.part(prompt[: window + 1], range(2, window + 1))])
    second = run_logits(executor, "prefill", [place.part(prompt[window + 1 : end], range(end - window - 1))])
    decoded = [run_logits(executor, "decode", [place.part([token], [0])]) for token in prompt[end:]]
    result = parity(np.concatenate([first, second, *decoded]), expected, largest_error([expected]), slice(2, None))
    assert result.holds, result
