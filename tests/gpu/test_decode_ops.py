"""Every op with weights on the GPU against the reference ops, from one token on.

T crosses the border between the low-latency kernels (up to 8 tokens) and the matrix products; more tokens and more
experts are in test_wide_ops. Values are the reference's; how far a kernel may be from them says the torch oracle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS, FieldValue
from flint_runtime.executors.reference_ops import REFERENCE_OPS, rms_norm
from flint_runtime.executors.reference_weights import WeightCache
from tests.gpu import torch_oracle as oracle
from tests.gpu.inputs import EPS, FORMATS
from tests.gpu.ops import run_op
from tests.gpu.test_gemm import normal, packed, run, stream

DEVICE = "cuda"
TOKENS = (1, 2, 3, 7, 8, 9, 33, 64)
FLINT = {"hidden": 2048, "heads": 32, "kv_heads": 4, "dense": 6144, "moe": 512, "shared": 1024}
NANO = {"hidden": 128, "heads": 16, "kv_heads": 2, "dense": 256, "moe": 64, "shared": 64}
SHAPES = {"flint": FLINT, "nano": NANO}


def reference(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return REFERENCE_OPS[op](fields, inputs, WeightCache(0))


def allowed(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The oracle's allowance of each output."""
    device = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    return {name: expected.allowed for name, expected in oracle.OPS[op](fields, device).items()}


def compare(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> None:
    """Run on the GPU twice and once by reference; every output must agree."""
    found, expected, bound = run(op, fields, inputs), reference(op, fields, inputs), allowed(op, fields, inputs)
    for name, value in expected.items():
        oracle.check(found[name], oracle.Bounded(value.cuda(), bound[name]), oracle.ALL, name)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("columns", "rows"), [(4096, 2048), (6144, 2048), (2048, 128), (256, 128)])
def test_linear(columns: int, rows: int, tokens: int, fmt: str) -> None:
    generator = np.random.default_rng(tokens)
    inputs = {"x": normal((tokens, columns), generator), **packed("weight", fmt, (rows, columns), (1,), generator)}
    compare("Linear", {"weights": fmt}, inputs)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_mlp(shape: str, tokens: int, fmt: str) -> None:
    generator, s = np.random.default_rng(tokens), SHAPES[shape]
    inputs = stream(tokens, s["hidden"], generator)
    inputs |= packed("gate_up", fmt, (2 * s["dense"], s["hidden"]), (2,), generator)
    inputs |= packed("down", fmt, (s["hidden"], s["dense"]), (1,), generator)
    compare("NormMlp", {"weights": fmt, "eps": EPS}, inputs)


def moe_inputs(s: dict[str, int], experts: int, tokens: int, fmt: str, router: torch.dtype) -> dict[str, Tensor]:
    generator = np.random.default_rng(tokens)
    inputs = stream(tokens, s["hidden"], generator)
    spread = generator.standard_normal((experts, s["hidden"]), dtype=np.float32) / s["hidden"] ** 0.5
    inputs["router"] = torch.from_numpy(spread).to(router)
    size, shared, hidden = s["moe"], s["shared"], s["hidden"]
    inputs |= packed("experts_gate_up", fmt, (2 * size, hidden), (2,), generator, (experts,))
    inputs |= packed("experts_down", fmt, (hidden, size), (), generator, (experts,))
    inputs |= packed("shared_gate_up", fmt, (2 * shared, hidden), (2,), generator)
    inputs |= packed("shared_down", fmt, (hidden, shared), (1,), generator)
    # Route without near-ties: a token whose 6th and 7th logit (or two chosen ones) are close gets another's row.
    x = rms_norm(inputs["delta"].float() + inputs["residual"].float(), inputs["norm"], EPS).double()
    top = torch.sort(x @ inputs["router"].double().T, descending=True).values[:, :7]
    clear = (top[:, :-1] - top[:, 1:]).amin(-1) > 1e-4
    best = int((top[:, :-1] - top[:, 1:]).amin(-1).argmax())
    assert bool(clear[best])
    for name in ("delta", "residual"):
        inputs[name][~clear] = inputs[name][best].clone()
    return inputs


@pytest.mark.parametrize("router", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("shape", "experts"), [("flint", 16), ("nano", 16)])
def test_norm_moe(shape: str, experts: int, tokens: int, fmt: str, router: torch.dtype) -> None:
    inputs = moe_inputs(SHAPES[shape], experts, tokens, fmt, router)
    compare("NormMoe", {"weights": fmt, "eps": EPS, "top_k": 6}, inputs)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 64])
def test_lm_head(rows: int, shape: str, fmt: str) -> None:
    generator, hidden, vocabulary = np.random.default_rng(rows), SHAPES[shape]["hidden"], 16 * 199
    inputs = stream(100, hidden, generator) | packed("weight", fmt, (vocabulary, hidden), (1,), generator)
    inputs["logits_rows"] = torch.from_numpy(generator.integers(0, 100, rows).astype(np.int32))
    fields: dict[str, FieldValue] = {"weights": fmt, "eps": EPS}
    compare("LmHead", fields, inputs)


def qkv_weights(s: dict[str, int], fmt: str, generator: np.random.Generator) -> dict[str, Tensor]:
    inputs = packed("qkv", fmt, ((s["heads"] + 2 * s["kv_heads"]) * 128, s["hidden"]), (3,), generator)
    for name in ("q_norm", "k_norm"):
        inputs[name] = torch.from_numpy(generator.uniform(0.5, 1.5, 128).astype(np.float32))
    return inputs


def qkv_case(
    s: dict[str, int],
    fmt: str,
    lengths: list[int],
    starts: list[int],
    attention: str,
    phase: str,
    first: bool,
    padding: int = 2,
    ring: int = 528,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, FieldValue], dict[str, Tensor]]:
    """A ragged batch: sequence b writes `lengths[b]` tokens from position `starts[b]` on; padding rows behind.

    Args:
        ring: tokens of a ring.
        weights: of `qkv_weights`, to use again.
    """
    generator, tokens = np.random.default_rng(sum(lengths)), sum(lengths) + padding
    hidden, heads, kv_heads = s["hidden"], s["heads"], s["kv_heads"]
    fields: dict[str, FieldValue] = {
        "weights": fmt, "eps": EPS, "has_residual": int(not first), "attention": attention, "phase": phase,
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128,
    }  # fmt: skip
    inputs: dict[str, Any] = stream(tokens, hidden, generator)
    if first:
        del inputs["residual"]
    inputs |= qkv_weights(s, fmt, generator) if weights is None else weights
    positions = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)] + [0] * padding
    longest = max(start + n for start, n in zip(starts, lengths, strict=True))
    inputs["positions"] = torch.tensor(positions, dtype=torch.int32)
    angles = np.arange(longest)[:, None] * 10000.0 ** (-np.arange(64) / 64)
    pages = -(-longest // 64)
    batch = len(lengths)
    if attention == "sliding":
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        inputs["rope"] = torch.from_numpy(table.astype(np.float32))
    if attention == "full" or phase == "decode":
        inputs["query_start"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    nan = float("nan")
    if attention == "full":
        table = generator.permutation(batch * pages).reshape(batch, pages)
        inputs["page_table"] = torch.from_numpy(table.astype(np.int32))
        inputs["kv_pool"] = torch.full((batch * pages, kv_heads, 2, 64, 128), nan, dtype=torch.bfloat16)
    elif phase == "decode":
        inputs["ring_slot"] = torch.from_numpy(generator.permutation(batch).astype(np.int32))
        inputs["kv_pool"] = torch.full((batch, kv_heads, 2, ring, 128), nan, dtype=torch.bfloat16)
    return fields, inputs


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["full", "sliding"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("lengths", "starts", "padding"),
    [
        ([1], [0], 0),
        ([1], [513], 0),
        ([1, 1], [63, 700], 0),
        ([1], [513], 2),
        ([1, 2, 3], [63, 527, 1000], 2),
        ([6], [61], 2),
        ([20, 1, 9], [0, 64, 500], 2),
        ([1] * 62, range(62), 2),
    ],
    ids=["first", "one", "two", "three", "eight", "page-border", "thirty-two", "sixty-four"],
)
def test_norm_qkv_rope(
    lengths: list[int], starts: list[int], padding: int, phase: str, attention: str, shape: str, fmt: str
) -> None:
    for first in (False, True):
        fields, inputs = qkv_case(SHAPES[shape], fmt, lengths, list(starts), attention, phase, first, padding)
        copies = [{name: tensor.clone() for name, tensor in inputs.items()} for _ in range(2)]
        expected = reference("NormQkvRope", fields, copies[0])
        device = {name: tensor.cuda() for name, tensor in inputs.items()}
        found = {name: tensor.cpu() for name, tensor in run_op("NormQkvRope", fields, device).items()}
        again = {name: tensor.cuda() for name, tensor in copies[1].items()}
        for name, tensor in run_op("NormQkvRope", fields, again).items():
            assert torch.equal(tensor.cpu().view(torch.int16), found[name].view(torch.int16)), f"{name} on repeat"
        rows, bound = sum(lengths), allowed("NormQkvRope", fields, inputs)
        if "kv_pool_out" in expected:
            # NaN where nothing was written, on both sides.
            assert torch.equal(expected["kv_pool_out"].isnan(), found["kv_pool_out"].isnan())
        for both in (expected, found):
            both["k"], both["v"] = written(inputs, both)
        for name in ("q", "k", "v") if first else ("q", "k", "v", "residual_out"):
            wanted = oracle.Bounded(expected[name][:rows], bound[name].cpu()[:rows])
            oracle.check(found[name][:rows], wanted, oracle.ALL, name)


def written(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """K and V [T, Hkv, 128] that a step wrote, from fresh_kv or from their places in the pool."""
    if "fresh_kv" in outputs:
        return iter(outputs["fresh_kv"].unbind(1))
    start, pool = inputs["query_start"], outputs["kv_pool_out"]
    sequence = torch.repeat_interleave(torch.arange(len(start) - 1), start.diff())
    place, entry = places(inputs, sequence, inputs["positions"][: len(sequence)].long())
    return (pool[place, :, part, entry] for part in (0, 1))


def places(inputs: Mapping[str, Tensor], sequence: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Page or ring slot of each position of its sequence, and entry therein."""
    if "page_table" in inputs:
        return inputs["page_table"].long()[sequence, positions // PAGE_TOKENS], positions % PAGE_TOKENS
    return inputs["ring_slot"].long()[sequence], positions % inputs["kv_pool"].shape[3]
