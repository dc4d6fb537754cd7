"""The oracle of the GPU tests (tests/gpu/torch_oracle.py), on the CPU, before it judges kernels.

Its values must be the reference executor's, which another hand wrote; its allowances must hold for sums in another
order and must not hold for what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flint_plugins.ops import FieldValue
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.reference_attention import sink_attention
from flint_runtime.executors.reference_ops import REFERENCE_OPS
from flint_runtime.executors.reference_weights import WeightCache
from flint_runtime.executors.reference_weights import unpack as unpack_by_reference
from flint_runtime.manifest import Limits
from tests.gpu import torch_oracle as oracle
from tests.gpu.inputs import FORMATS, node_inputs, random_packed
from tests.runtime.engines import Place, build_reference_engine, feed, open_poisoned

WIDE = {"hidden": 2048, "heads": 8, "kv_heads": 1, "dense": 2048, "moe": 512, "shared": 512, "experts": 16}
"""Flint's sums over K; fewer rows where they cost time and change nothing."""
NANO = {"hidden": 128, "heads": 16, "kv_heads": 2, "dense": 256, "moe": 64, "shared": 64, "experts": 16}
OPS = ("Linear", "NormMlp", "NormMoe", "LmHead", "NormQkvRope")


@pytest.fixture(autouse=True)
def _seed_and_one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [64, 128, 192, 256, 320, 512])
def test_unpack(columns: int, fmt: str) -> None:
    """All bytes, all orders of scales (one, two and four tiles at once), leading dimensions."""
    packed = random_packed(fmt, (3,), 48, columns)
    if fmt == "nvfp4":
        packed = torch.randint(-128, 128, packed.shape, dtype=torch.int8)
    for found, one in zip(oracle.unpack(packed), packed, strict=True):
        assert torch.equal(found.double(), unpack_by_reference(one))
    gate, up = oracle.gate_and_up(packed[0])
    assert torch.equal(torch.cat([gate, up]).double(), unpack_by_reference(packed[0], gate_up=True))


def by_reference(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference op's outputs, its k and v apart."""
    outputs = REFERENCE_OPS[op](fields, inputs, WeightCache(0))
    if "fresh_kv" in outputs:
        outputs["k"], outputs["v"] = outputs.pop("fresh_kv").unbind(1)
    return outputs


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_an_op_gives_the_references_bits(op: str, fmt: str) -> None:
    """Both round exact sums; FP64 sums in another order differ by 2^-50, so a flip would be a coincidence."""
    fields, inputs = node_inputs(op, fmt, NANO, 19, rows=5)
    found, expected = oracle.OPS[op](fields, inputs), by_reference(op, fields, inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].value, value), name


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize(("length", "new"), [(1, 1), (40, 40), (100, 3), (200, 130)])
def test_attention_gives_the_references_bits(
    length: int, new: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "_BLOCK_LOGITS", 50 * 16 * length)  # several blocks of queries
    q, k, v = (torch.randn(n, heads, 128).bfloat16() for n, heads in ((new, 16), (length, 2), (length, 2)))
    sinks = torch.randn(16)
    pages = -(-length // 64)
    pool = torch.zeros(pages * 64, 2, 2, 128, dtype=torch.bfloat16)
    pool[:length, :, 0], pool[:length, :, 1] = k, v
    inputs = {
        "q": q,
        "sinks": sinks,
        "query_start": torch.tensor([0, new]),
        "seq_lens": torch.tensor([length]),
        "page_table": torch.arange(pages).unsqueeze(0),
        "kv_pool": pool.view(pages, 64, 2, 2, 128).permute(0, 2, 3, 1, 4),
    }
    expected = sink_attention({"attention": "full", "window": window}, inputs)["out"]
    found = oracle.attention(q, k, v, sinks, window)
    oracle.check(found.value, oracle.Bounded(expected, torch.zeros(())), 0, "attention")


def truncated_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Sums as tensor cores make them: 16 terms exactly, added to an FP32 sum that is cut off, in another order."""
    order = torch.randperm(x.shape[1])
    total = torch.zeros(x.shape[0], weight.shape[0])
    for group in order.split(16):
        exact = total.double() + x[:, group].double() @ weight[:, group].double().T
        total = exact.float()
        total = torch.where(total.double().abs() > exact.abs(), torch.nextafter(total, torch.zeros(())), total)
    return total


Kernel = Callable[[], dict[str, oracle.Bounded]]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], dict[str, Tensor]]]:
    """Run an op as a kernel would: with its sums in another order."""

    def run(op: Kernel) -> dict[str, Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "sums", truncated_sums)
            return {name: result.value for name, result in op().items()}

    yield run


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_allowances_hold_for_another_order(op: str, fmt: str, kernel: Callable[[Kernel], dict[str, Tensor]]) -> None:
    fields, inputs = node_inputs(op, fmt, WIDE, 8, rows=8)
    if op == "NormMoe":
        clear = oracle.clear_choice(oracle.router_logits(fields, inputs), 6)
        inputs |= {name: inputs[name][clear] for name in ("delta", "residual")}
    expected = oracle.OPS[op](fields, inputs)
    for name, value in kernel(lambda: oracle.OPS[op](fields, inputs)).items():
        oracle.check(value, expected[name], oracle.ALL, name)


@contextmanager
def flipped_norms(columns: int) -> Iterator[None]:
    """The largest normalised value of every token (of a row of so many) one BF16 step off."""
    real = oracle.normalize

    def flipped(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        value = real(x, weight, eps)
        if value.shape[-1] != columns:
            return value
        at = value.float().abs().argmax(-1, keepdim=True)
        bits = value.view(torch.int16).scatter_add(-1, at, torch.ones_like(at, dtype=torch.int16))
        return bits.view(torch.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "normalize", flipped)
        yield


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("op", OPS[1:])
def test_allowances_hold_where_the_norm_flips(op: str, fmt: str) -> None:
    """What NORM and FLIPS are for: the largest normalised value of every token one BF16 step off."""
    fields, inputs = node_inputs(op, fmt, WIDE, 8, rows=8)
    expected = oracle.OPS[op](fields, inputs)
    chosen = {"chosen": oracle.choose(oracle.router_logits(fields, inputs), 6)} if op == "NormMoe" else {}
    with flipped_norms(WIDE["hidden"]):
        found = oracle.OPS[op](fields, inputs, **chosen)
    assert any(not torch.equal(result.value, expected[name].value) for name, result in found.items())
    for name, result in found.items():
        oracle.check(result.value, expected[name], 2**-8, name)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("context", [0, 1, 5, 70])
def test_allowances_of_attention_behind_a_projection(context: int, fmt: str) -> None:
    """NormQkvAttention: they hold where the norm of every token flips, not for values of another token's."""
    fields, inputs = node_inputs("NormQkvRope", fmt, WIDE, 3, rows=0)
    old_k, old_v = (torch.randn(context, WIDE["kv_heads"], 128).bfloat16() for _ in range(2))
    sinks = torch.randn(WIDE["heads"])

    def attend(qkv: dict[str, oracle.Bounded], rolled: int = 0) -> oracle.Bounded:
        k, v = torch.cat([old_k, qkv["k"].value]), torch.cat([old_v, qkv["v"].value.roll(rolled, 0)])
        return oracle.attention(qkv["q"].value, k, v, sinks, 0, qkv["v"].allowed)

    expected = oracle.OPS["NormQkvRope"](fields, inputs)
    with flipped_norms(WIDE["hidden"]):
        found = attend(oracle.OPS["NormQkvRope"](fields, inputs)).value
    oracle.check(found, attend(expected), oracle.ATTENTION_ALL, "flipped")
    with pytest.raises(AssertionError, match="differ"):
        oracle.check(attend(expected, rolled=1).value, attend(expected), 1.0, "rolled")


@pytest.mark.parametrize("op", OPS)
def test_allowances_do_not_hold_for_wrong_results(op: str) -> None:
    """Two steps more everywhere; a tensor scale of another projection; rows of another token."""
    fields, inputs = node_inputs(op, "nvfp4", NANO, 19, rows=5)
    expected = oracle.OPS[op](fields, inputs)
    name = next(iter(expected))
    scale = next(key for key in inputs if key.endswith("_scale"))
    wrong_scale = oracle.OPS[op](fields, {**inputs, scale: inputs[scale] * 1.05})[name].value
    for wrong in (expected[name].value * (1 + 2**-6), wrong_scale, expected[name].value.roll(1, 0)):
        with pytest.raises(AssertionError, match=r"rms error|differ"):
            oracle.check(wrong, expected[name], oracle.ALL, name)
    spoilt = expected[name].value.clone()
    spoilt.view(-1)[7] = torch.nan
    with pytest.raises(AssertionError, match="1 of"):
        oracle.check(spoilt, expected[name], oracle.ALL, name)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_model_gives_the_reference_executors_logits(fmt: str, random_nano: Path, tmp_path: Path) -> None:
    """Three windows of tokens at once, against prefill in chunks: only FP64 sums in another order differ."""
    checkpoint = random_nano if fmt == "bf16" else random_nano / "nano.gguf"
    limits = Limits(max_batch=1, max_context=192, prefill_chunk=50)
    directory = build_reference_engine(checkpoint, tmp_path / "engine", limits, config=random_nano)
    executor = open_poisoned(directory)
    tokens = torch.randint(0, executor.config.vocab_size, (110,))
    expected = feed(executor, Place(executor), tokens.tolist(), limits.prefill_chunk)
    rows = [0, 1, 32, 33, 34, 64, 109]
    found = oracle.forward(executor.config, executor._weights, tokens, rows, {})
    torch.testing.assert_close(found, torch.from_numpy(expected[rows]), rtol=1e-4, atol=1e-4)
    assert isinstance(executor, ReferenceExecutor)


def test_a_model_takes_the_experts_it_is_given(random_nano: Path, tmp_path: Path) -> None:
    limits = Limits(max_batch=1, max_context=64, prefill_chunk=50)
    executor = open_poisoned(build_reference_engine(random_nano, tmp_path / "engine", limits))
    tokens = torch.arange(20)
    layer = max(set(range(executor.config.num_hidden_layers)) - set(executor.config.mlp_only_layers))
    given = torch.arange(6).expand(20, 6)
    free, forced = (
        oracle.forward(executor.config, executor._weights, tokens, [19], chosen) for chosen in ({}, {layer: given})
    )
    assert not torch.equal(free, forced)
