"""Every op with weights on the GPU against the reference ops, from one token on; prefill sizes are in test_gemm.

T crosses the border between the low-latency kernels (up to 8 tokens) and the matrix products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flint_plugins.ops import FieldValue
from flint_runtime.executors.reference_ops import REFERENCE_OPS, rms_norm
from flint_runtime.executors.reference_weights import WeightCache
from tests.gpu.ops import run_op
from tests.gpu.test_gemm import EPS, FORMATS, check, normal, packed, run, stream

TOKENS = (1, 2, 3, 7, 8, 9, 33, 64)
FLINT = {"hidden": 2048, "heads": 32, "kv_heads": 4, "dense": 6144, "moe": 512, "shared": 1024}
NANO = {"hidden": 128, "heads": 16, "kv_heads": 2, "dense": 256, "moe": 64, "shared": 64}
SHAPES = {"flint": FLINT, "nano": NANO}


def reference(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return REFERENCE_OPS[op](fields, inputs, WeightCache(0))


def compare(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor], kind: str) -> None:
    """Run on the GPU twice and once by reference; every output must agree, BF16 copies and sums to the bit."""
    found, expected = run(op, fields, inputs), reference(op, fields, inputs)
    for name in expected:
        if name == "residual_out":
            assert torch.equal(found[name], expected[name]), name
        else:
            check(kind, found[name].flatten(1), expected[name].flatten(1))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("columns", "rows"), [(4096, 2048), (6144, 2048), (2048, 128), (256, 128)])
def test_linear(columns: int, rows: int, tokens: int, fmt: str) -> None:
    generator = np.random.default_rng(tokens)
    inputs = {"x": normal((tokens, columns), generator), **packed("weight", fmt, (rows, columns), (1,), generator)}
    compare("Linear", {"weights": fmt}, inputs, "Linear")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_mlp(shape: str, tokens: int, fmt: str) -> None:
    generator, s = np.random.default_rng(tokens), SHAPES[shape]
    inputs = stream(tokens, s["hidden"], generator)
    inputs |= packed("gate_up", fmt, (2 * s["dense"], s["hidden"]), (2,), generator)
    inputs |= packed("down", fmt, (s["hidden"], s["dense"]), (1,), generator)
    compare("NormMlp", {"weights": fmt, "eps": EPS}, inputs, "NormMlp")


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
    compare("NormMoe", {"weights": fmt, "eps": EPS, "top_k": 6}, inputs, "NormMoe")


@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_norm_moe_with_256_experts(tokens: int) -> None:
    inputs = moe_inputs(FLINT, 256, tokens, "nvfp4", torch.float32)
    compare("NormMoe", {"weights": "nvfp4", "eps": EPS, "top_k": 6}, inputs, "NormMoe")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 64])
def test_lm_head(rows: int, shape: str, fmt: str) -> None:
    generator, hidden, vocabulary = np.random.default_rng(rows), SHAPES[shape]["hidden"], 16 * 199
    inputs = stream(100, hidden, generator) | packed("weight", fmt, (vocabulary, hidden), (1,), generator)
    inputs["logits_rows"] = torch.from_numpy(generator.integers(0, 100, rows).astype(np.int32))
    fields: dict[str, FieldValue] = {"weights": fmt, "eps": EPS}
    device = {name: tensor.cuda() for name, tensor in inputs.items()}
    first, second = (run_op("LmHead", fields, device)["logits"].cpu().clone() for _ in range(2))
    assert torch.equal(first, second)
    expected = reference("LmHead", fields, inputs)["logits"]
    # Sums of K products of order 1 / sqrt(K) in FP32, another order: sqrt(K) 2^-24 of the magnitude, times 10.
    # A normalised value next to a rounding border may differ by a BF16 step in one of K: 2^-8 / sqrt(K), times 12.
    assert (first - expected).abs().max() < 10 * hidden**0.5 * 2**-24 + 12 * 2**-8 * hidden**-0.5


def qkv_case(
    s: dict[str, int], fmt: str, lengths: list[int], starts: list[int], attention: str, phase: str, first: bool
) -> tuple[dict[str, FieldValue], dict[str, Tensor]]:
    """A ragged batch: sequence b writes `lengths[b]` tokens from position `starts[b]` on; two padding rows behind."""
    generator, tokens = np.random.default_rng(sum(lengths)), sum(lengths) + 2
    hidden, heads, kv_heads = s["hidden"], s["heads"], s["kv_heads"]
    fields: dict[str, FieldValue] = {
        "weights": fmt, "eps": EPS, "has_residual": int(not first), "attention": attention, "phase": phase,
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 128,
    }  # fmt: skip
    inputs: dict[str, Any] = stream(tokens, hidden, generator)
    if first:
        del inputs["residual"]
    inputs |= packed("qkv", fmt, ((heads + 2 * kv_heads) * 128, hidden), (3,), generator)
    for name in ("q_norm", "k_norm"):
        inputs[name] = torch.from_numpy(generator.uniform(0.5, 1.5, 128).astype(np.float32))
    positions = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)] + [0, 0]
    longest = max(positions) + 1
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
        inputs["kv_pool"] = torch.full((batch, kv_heads, 2, 528, 128), nan, dtype=torch.bfloat16)
    return fields, inputs


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["full", "sliding"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([1], [0]),
        ([1], [513]),
        ([1, 2, 3], [63, 527, 1000]),
        ([6], [61]),
        ([20, 1, 9], [0, 64, 500]),
        ([1] * 62, range(62)),
    ],
    ids=["first", "one", "eight", "page-border", "thirty-two", "sixty-four"],
)
def test_norm_qkv_rope(lengths: list[int], starts: list[int], phase: str, attention: str, shape: str, fmt: str) -> None:
    for first in (False, True):
        fields, inputs = qkv_case(SHAPES[shape], fmt, lengths, list(starts), attention, phase, first)
        copies = [{name: tensor.clone() for name, tensor in inputs.items()} for _ in range(2)]
        expected = reference("NormQkvRope", fields, copies[0])
        device = {name: tensor.cuda() for name, tensor in inputs.items()}
        found = {name: tensor.cpu() for name, tensor in run_op("NormQkvRope", fields, device).items()}
        again = {name: tensor.cuda() for name, tensor in copies[1].items()}
        for name, tensor in run_op("NormQkvRope", fields, again).items():
            assert torch.equal(tensor.cpu().view(torch.int16), found[name].view(torch.int16)), f"{name} on repeat"
        rows = sum(lengths)
        for name, tensor in expected.items():
            if name == "residual_out":
                assert torch.equal(found[name], tensor)
            elif name == "kv_pool_out":
                # NaN where nothing was written, on both sides.
                written = ~torch.isnan(tensor)
                assert torch.equal(written, ~torch.isnan(found[name]))
                check("NormQkvRope", found[name][written].unsqueeze(0), tensor[written].unsqueeze(0))
            else:
                # Two roundings in a row (projection, norm) and RoPE's: a flip of one moves the next.
                check("NormQkvRope", found[name][:rows].flatten(1), tensor[:rows].flatten(1))
