"""Each op of the reference executor against a plain formula in float64, one token, head or expert at a time.

Tolerance: the formulas round to BF16 where the rules do, so results differ only where an FP32 rounding falls on the
other side of a BF16 boundary: at most one BF16 step (2^-7 relative) in few places. RoPE mixes two values that were
rounded before, so behind it a step is one of their common magnitude, not of what is left of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from flint_plugins.layout import interleave_gate_up, pack_bf16, pack_nvfp4
from flint_plugins.ops import OPS, FieldValue, SchemaError
from flint_runtime.executors.base import NO_TOKEN
from flint_runtime.executors.reference_ops import REFERENCE_OPS, route
from flint_runtime.executors.reference_weights import WeightCache, unpack
from flint_runtime.executors.step import from_slot
from tests.tools import nvfp4

F64 = npt.NDArray[np.float64]
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int8: "i8"}
EPS = 1e-6
BF16_STEP = 2.0**-7

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same inputs in every order of the tests."""
    torch.manual_seed(0)


def r(x: F64) -> F64:
    """Round to BF16, by way of FP32."""
    return torch.from_numpy(np.asarray(x, np.float32)).bfloat16().double().numpy()


def f64(x: Tensor) -> F64:
    """A tensor's values."""
    return x.double().numpy()


def ints(*values: int) -> Tensor:
    """An int32 vector."""
    return torch.tensor(values, dtype=torch.int32)


def call(name: str, fields: dict[str, FieldValue], **inputs: Tensor) -> dict[str, Tensor]:
    """Run one op through its schema: inputs by binding name, every output checked."""
    op = OPS[name]
    names = [b.name for b in op.node_inputs(fields)]
    assert set(names) == set(inputs)
    symbols = op.solve(fields, [tuple(inputs[n].shape) for n in names], [DTYPES[inputs[n].dtype] for n in names])
    outputs = REFERENCE_OPS[name](fields, inputs, WeightCache())
    for binding, shape in zip(op.node_outputs(fields), op.output_shapes(fields, symbols), strict=True):
        assert tuple(outputs[binding.name].shape) == shape
        assert DTYPES[outputs[binding.name].dtype] in binding.dtypes
    return outputs


def assert_close(found: Tensor, expected: F64, magnitude: F64 | None = None) -> None:
    """At most one BF16 step of `magnitude` (of the value itself) apart, and equal nearly everywhere."""
    values = f64(found)
    allowed = BF16_STEP * np.abs(expected if magnitude is None else magnitude) + 1e-6
    worst = np.unravel_index(np.argmax(np.abs(values - expected) - allowed), values.shape)
    assert abs(values[worst] - expected[worst]) <= allowed[worst], (worst, values[worst], expected[worst])
    assert np.isfinite(values).all()
    assert (values == r(expected)).mean() > 0.98


class Weights:
    """Random packed weights with the plain matrices they stand for."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = kind
        self.generator = np.random.default_rng(seed)

    def make(
        self, name: str, rows: list[int], columns: int, gate_up: bool = False
    ) -> tuple[dict[str, Tensor], list[F64]]:
        """Inputs of a packed weight of several sources with different tensor scales, and each source's values.

        The values are without tensor scale: e2m1 * e4m3.
        """
        sources = [self.generator.standard_normal((n, columns)).astype(np.float32) / columns**0.5 for n in rows]
        if self.kind == "bf16":
            tensors = [torch.from_numpy(s).bfloat16() for s in sources]
            parts: list[Any] = [t.view(torch.int16).numpy().view(np.uint16) for t in tensors]
            plain = [f64(t) for t in tensors]
            packed = torch.from_numpy(pack_bf16(self._stack(parts, gate_up)).view(np.int16)).view(torch.bfloat16)
            return {name: packed}, plain
        quantised = [nvfp4.quantize(s, np.float32(0.01 * (i + 1))) for i, s in enumerate(sources)]
        packed = torch.from_numpy(pack_nvfp4(self._stack([b for b, _ in quantised], gate_up)).view(np.int8))
        scales = torch.tensor([float(s) for _, s in quantised])
        return {name: packed, f"{name}_scale": scales}, [
            nvfp4.dequantize(b, 1.0).astype(np.float64) for b, _ in quantised
        ]

    @staticmethod
    def _stack(parts: list[Any], gate_up: bool) -> Any:
        return interleave_gate_up(*parts) if gate_up else np.concatenate(parts)


def scale_of(inputs: dict[str, Tensor], name: str, index: int = 0) -> np.float32:
    """A tensor scale; 1 for BF16 weights."""
    scale = inputs.get(f"{name}_scale")
    value: np.float32 = np.float32(1 if scale is None else float(scale.reshape(-1)[index]))
    return value


def matmul(x: F64, weight: F64, scale: np.float32) -> F64:
    """FP32 accumulator times FP32 scale."""
    total: npt.NDArray[np.float32] = (x @ weight.T).astype(np.float32)
    return (total * scale).astype(np.float64)


def norm(x: F64, weight: Tensor) -> F64:
    """RMSNorm, rounded to BF16."""
    return r(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * f64(weight))


def swiglu(x: F64, gate: F64, up: F64) -> F64:
    """silu(g) * u, rounded to BF16."""
    return r(gate / (1 + np.exp(-gate)) * up)


def stream(tokens: int, hidden: int, seed: int = 1) -> dict[str, Tensor]:
    """Random delta, residual and norm."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "delta": torch.randn(tokens, hidden, generator=generator).bfloat16(),
        "residual": (3 * torch.randn(tokens, hidden, generator=generator)).bfloat16(),
        "norm": 1 + 0.2 * torch.randn(hidden, generator=generator),
    }


KINDS = pytest.mark.parametrize("kind", ["bf16", "nvfp4"])


@KINDS
def test_unpack_is_exact(kind: str) -> None:
    inputs, (gate, up) = Weights(kind).make("w", [32, 32], 128, gate_up=True)
    np.testing.assert_array_equal(unpack(inputs["w"], gate_up=True).numpy(), np.concatenate([gate, up]))
    assert (r(gate) == gate).all()


def test_cache_respects_its_budget() -> None:
    inputs, (plain,) = Weights("nvfp4").make("w", [64], 128)
    cache = WeightCache(budget_bytes=64 * 128 * 8 - 1)
    assert cache.matrix(inputs["w"]) is not cache.matrix(inputs["w"])
    cache = WeightCache(budget_bytes=64 * 128 * 8)
    assert cache.matrix(inputs["w"]) is cache.matrix(inputs["w"])
    np.testing.assert_array_equal(cache.matrix(inputs["w"]).numpy(), plain)


def test_embedding() -> None:
    table = torch.randn(32, 64).bfloat16()
    out = call("Embedding", {}, token_ids=ints(3, 0, 31), last_tokens=ints(9), table=table)["out"]
    assert torch.equal(out, table[[3, 0, 31]])


def test_embedding_of_tokens_that_a_slot_drew() -> None:
    """Also of none: NO_TOKEN, a token or a slot that does not exist give NaN."""
    table, last = torch.randn(32, 64).bfloat16(), ints(9, NO_TOKEN, 31, 32)
    ids = ints(from_slot(2), 4, from_slot(0), from_slot(1), from_slot(3), from_slot(4), 32, -(2**31))
    out = call("Embedding", {}, token_ids=ids, last_tokens=last, table=table)["out"]
    assert torch.equal(out[:3], table[[31, 4, 9]])
    assert out[3:].isnan().all()


@KINDS
def test_linear(kind: str) -> None:
    inputs, (plain,) = Weights(kind).make("weight", [48], 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = call("Linear", {"weights": kind}, x=x, **inputs)["y"]
    assert_close(y, r(matmul(f64(x), plain, scale_of(inputs, "weight"))))


@KINDS
def test_norm_mlp(kind: str) -> None:
    weights = Weights(kind)
    gate_up, (gate, up) = weights.make("gate_up", [64, 64], 128, gate_up=True)
    down, (plain_down,) = weights.make("down", [128], 64)
    t = stream(6, 128)
    found = call("NormMlp", {"weights": kind, "eps": EPS}, **t, **gate_up, **down)
    total = f64(t["delta"]) + f64(t["residual"])
    x = norm(total, t["norm"])
    g, u = (r(matmul(x, w, scale_of(gate_up, "gate_up", i))) for i, w in enumerate((gate, up)))
    assert torch.equal(found["residual_out"], torch.from_numpy(total).bfloat16())
    assert_close(found["out"], r(matmul(swiglu(x, g, u), plain_down, scale_of(down, "down"))))


def test_norm_takes_the_unrounded_sum() -> None:
    """The residual is 2^10 times the delta, so r(s) drops what the norm must still see."""
    weights, (plain,) = Weights("bf16").make("weight", [32], 64)
    delta = torch.full((1, 64), 1.0).bfloat16()
    residual = torch.full((1, 64), 300.0).bfloat16()
    residual[0, ::2] = -300.0
    norm_weight = torch.ones(64)
    rows = {"delta": delta, "residual": residual, "norm": norm_weight}
    fields: dict[str, FieldValue] = {"weights": "bf16", "eps": EPS}
    found = call("LmHead", fields, **rows, **weights, logits_rows=ints(0))["logits"]
    exact, rounded = (
        norm(s, norm_weight) @ plain.T for s in (f64(delta) + f64(residual), r(f64(delta) + f64(residual)))
    )
    assert np.abs(f64(found) - exact).max() < 1e-5 < np.abs(exact - rounded).max()


@KINDS
def test_lm_head_takes_the_rows_asked_for(kind: str) -> None:
    weights, (plain,) = Weights(kind).make("weight", [96], 128)
    t = stream(6, 128)
    found = call("LmHead", {"weights": kind, "eps": EPS}, **t, **weights, logits_rows=ints(5, 2, 2))["logits"]
    x = norm(f64(t["delta"]) + f64(t["residual"]), t["norm"])[[5, 2, 2]]
    np.testing.assert_allclose(f64(found), matmul(x, plain, scale_of(weights, "weight")), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ experts


@KINDS
@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
def test_norm_moe(kind: str, router_dtype: torch.dtype) -> None:
    experts, top_k, hidden, size, tokens = 8, 3, 128, 64, 7
    weights = Weights(kind)
    stacks = [
        (weights.make("gu", [size, size], hidden, gate_up=True), weights.make("d", [hidden], size))
        for _ in range(experts)
    ]
    inputs = {
        "experts_gate_up": torch.stack([gu["gu"] for (gu, _), _ in stacks]),
        "experts_down": torch.stack([d["d"] for _, (d, _) in stacks]),
    }
    if kind == "nvfp4":
        # Different for every expert: their scales must not be mixed up.
        factor = 1 + torch.arange(experts) / experts
        inputs["experts_gate_up_scale"] = stacks[0][0][0]["gu_scale"] * factor[:, None]
        inputs["experts_down_scale"] = stacks[0][1][0]["d_scale"] * factor
    shared_down, (plain_shared_down,) = weights.make("shared_down", [hidden], 64)
    shared_gate_up, shared = weights.make("shared_gate_up", [64, 64], hidden, gate_up=True)
    router = (torch.randn(experts, hidden, generator=torch.Generator().manual_seed(4)) / hidden**0.5).to(router_dtype)
    t = stream(tokens, hidden)
    fields: dict[str, FieldValue] = {"weights": kind, "eps": EPS, "top_k": top_k}
    found = call("NormMoe", fields, **t, router=router, **inputs, **shared_gate_up, **shared_down)
    x = norm(f64(t["delta"]) + f64(t["residual"]), t["norm"])
    expected = np.empty((tokens, hidden))
    for i, row in enumerate(x):
        logits = f64(router) @ row
        chosen = np.argsort(-logits, kind="stable")[:top_k]
        scores = 1 / (1 + np.exp(-logits[chosen]))
        routed = np.zeros(hidden)
        for expert, weight in zip(chosen, scores / scores.sum(), strict=True):
            (_, (gate, up)), (_, (down,)) = stacks[expert]
            flat = {n: s.reshape(experts, -1)[expert] for n, s in inputs.items() if n.endswith("_scale")}
            g, u = (matmul(row, w, scale_of(flat, "experts_gate_up", j)) for j, w in enumerate((gate, up)))
            routed += weight * r(matmul(swiglu(row, g, u), down, scale_of(flat, "experts_down")))
        g, u = (r(matmul(row, w, scale_of(shared_gate_up, "shared_gate_up", j))) for j, w in enumerate(shared))
        own = r(matmul(swiglu(row, g, u), plain_shared_down, scale_of(shared_down, "shared_down")))
        expected[i] = r(r(routed) + own)
    assert_close(found["out"], expected)
    assert torch.equal(found["residual_out"], (t["delta"].float() + t["residual"].float()).bfloat16())


def test_router_ties_go_to_the_lowest_index() -> None:
    router = torch.zeros(8, 64)
    router[6] = 1
    chosen, weights = route(torch.ones(2, 64).bfloat16(), router, 4)
    assert chosen.tolist() == [[6, 0, 1, 2]] * 2
    np.testing.assert_allclose(weights[0].numpy(), np.array([1, 0.5, 0.5, 0.5]) / 2.5, rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------- QKV, RoPE

HEADS, KV_HEADS, DIM, RING = 4, 2, 64, 16


def rope_table(rows: int) -> Tensor:
    """cos, then sin, of every frequency."""
    angle = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    return torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], axis=1)).float()


def rotate(x: F64, position: int) -> F64:
    """RoPE as a product of complex numbers: x [D]."""
    angle = position * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    z = (x[: DIM // 2] + 1j * x[DIM // 2 :]) * np.exp(1j * angle)
    return r(np.concatenate([z.real, z.imag]))


def pair_magnitude(x: F64) -> F64:
    """Of the pairs [..., D] that RoPE rotated, with half a step for its own rounding."""
    pair = np.hypot(x[..., : DIM // 2], x[..., DIM // 2 :])
    return 1.5 * np.concatenate([pair, pair], axis=-1)


@KINDS
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("attention", ["full", "sliding"])
@pytest.mark.parametrize("has_residual", [0, 1])
def test_norm_qkv_rope(kind: str, phase: str, attention: str, has_residual: int) -> None:
    """Two sequences with 3 and 2 tokens and a row of padding, which must leave no trace in the pool."""
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    weights, plain = Weights(kind).make("qkv", sizes, 128)
    t = stream(6, 128)
    total = f64(t["delta"]) + (f64(t["residual"]) if has_residual else 0)
    if not has_residual:
        del t["residual"]
    positions = [20, 21, 22, 130, 131, 0]
    t |= {"q_norm": 1 + 0.2 * torch.randn(DIM), "k_norm": 1 + 0.2 * torch.randn(DIM), "positions": ints(*positions)}
    if attention == "sliding":
        t["rope"] = rope_table(200)
    if attention == "full":
        pool = torch.full((7, KV_HEADS, 2, 64, DIM), torch.nan).bfloat16()
        t["page_table"] = torch.tensor([[5, -1, -1], [2, 4, 6]], dtype=torch.int32)
    else:
        pool = torch.full((3, KV_HEADS, 2, RING, DIM), torch.nan).bfloat16()
        t["ring_slot"] = ints(2, 0)
    t |= {"query_start": ints(0, 3, 5), "kv_pool": pool}
    if attention == "sliding" and phase == "prefill":
        for name in ("query_start", "ring_slot", "kv_pool"):
            del t[name]
    fields: dict[str, FieldValue] = {
        "weights": kind, "eps": EPS, "has_residual": has_residual, "attention": attention, "phase": phase,
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM,
    }  # fmt: skip
    found = call("NormQkvRope", fields, **t, **weights)
    x = norm(total, t["norm"])
    q, k, v = (r(matmul(x, w, scale_of(weights, "qkv", i))).reshape(6, -1, DIM) for i, w in enumerate(plain))
    q, k = norm(q, t["q_norm"]), norm(k, t["k_norm"])
    if attention == "sliding":
        q, k = (np.array([[rotate(h, p) for h in y] for y, p in zip(z, positions, strict=True)]) for z in (q, k))
    sizes_of = pair_magnitude if attention == "sliding" else np.abs
    assert_close(found["q"], q, sizes_of(q))
    if has_residual:
        assert torch.equal(found["residual_out"], torch.from_numpy(total).bfloat16())
    if "fresh_kv" in found:
        assert_close(found["fresh_kv"], np.stack([k, v], axis=1), np.stack([sizes_of(k), v], axis=1))
        return
    assert found["kv_pool_out"].data_ptr() == pool.data_ptr()
    places = (
        [(5, 20), (5, 21), (5, 22), (6, 2), (6, 3)] if attention == "full" else [(2, 4), (2, 5), (2, 6), (0, 2), (0, 3)]
    )
    written = torch.stack([pool[a, :, :, b] for a, b in places])
    assert_close(written, np.stack([k, v], axis=2)[:5], np.stack([sizes_of(k), v], axis=2)[:5])
    assert int(pool.isfinite().sum()) == 5 * KV_HEADS * 2 * DIM


# ---------------------------------------------------------------------------------------------------------- attention


class Attention:
    """Sequences with random K and V, laid out in poisoned pools as an executor would have left them."""

    def __init__(self, lengths: list[int], new: list[int], attention: str, phase: str, window: int, ring: int) -> None:
        self.lengths, self.new, self.window = lengths, new, window
        self.full, self.fresh = attention == "full", attention == "sliding" and phase == "prefill"
        generator = torch.Generator().manual_seed(sum(lengths))
        self.kv = [torch.randn(n, 2, KV_HEADS, DIM, generator=generator).bfloat16() for n in lengths]
        tokens = sum(new) + 1  # and one row of padding
        self.q = torch.randn(tokens, HEADS, DIM, generator=generator).bfloat16()
        self.sinks = torch.randn(HEADS, generator=generator)
        positions = [p for n, k in zip(lengths, new, strict=True) for p in range(n - k, n)]
        self.inputs = {
            "q": self.q,
            "sinks": self.sinks,
            "positions": ints(*positions, 0),
            "query_start": ints(*np.cumsum([0, *new]).tolist()),
            "seq_lens": ints(*lengths),
        }
        batch = len(lengths)
        if self.full:
            pages = [-(-n // 64) for n in lengths]
            pool = torch.full((sum(pages) + 2, KV_HEADS, 2, 64, DIM), torch.nan).bfloat16()
            order = iter(np.random.default_rng(0).permutation(len(pool)).tolist())
            table = torch.full((batch, max(pages)), -1, dtype=torch.int32)
            for b, kv in enumerate(self.kv):
                for page in range(pages[b]):
                    table[b, page] = next(order)
                    part = kv[page * 64 : page * 64 + 64]
                    pool[table[b, page], :, :, : len(part)] = part.permute(2, 1, 0, 3)
            self.inputs |= {"page_table": table, "kv_pool": pool}
        else:
            pool = torch.full((batch + 1, KV_HEADS, 2, ring, DIM), torch.nan).bfloat16()
            for b, kv in enumerate(self.kv):
                stored = lengths[b] - (new[b] if self.fresh else 0)
                # Only what the step's first query may see: everything older stays NaN.
                for p in range(max(0, lengths[b] - new[b] - window + 1), stored):
                    pool[batch - b, :, :, p % ring] = kv[p].permute(1, 0, 2)
            self.inputs |= {"ring_slot": ints(*range(batch, 0, -1)), "kv_pool": pool}
        if self.fresh:
            rows = [kv[len(kv) - k :] for kv, k in zip(self.kv, new, strict=True)]
            self.inputs["fresh_kv"] = torch.cat([*rows, torch.full_like(self.kv[0][:1], torch.nan)])
        self.fields: dict[str, FieldValue] = {
            "attention": attention, "phase": phase, "window": 0 if self.full else window, "num_kv_heads": KV_HEADS
        }  # fmt: skip

    def run(self) -> dict[str, Tensor]:
        return call("SinkAttention", self.fields, **self.inputs)

    def expected(self) -> F64:
        """The textbook formula, one query and head at a time."""
        out, row = np.zeros((len(self.q), HEADS, DIM)), 0
        for kv, length, new in zip(self.kv, self.lengths, self.new, strict=True):
            for p in range(length - new, length):
                first = 0 if self.full else max(0, p - self.window + 1)
                for head in range(HEADS):
                    k, v = (f64(kv[first : p + 1, i, head * KV_HEADS // HEADS]) for i in range(2))
                    weights = np.exp(k @ f64(self.q[row, head]) * DIM**-0.5)
                    out[row, head] = weights @ v / (weights.sum() + np.exp(float(self.sinks[head])))
                row += 1
        return out.reshape(len(self.q), -1)


LAYOUTS = pytest.mark.parametrize(
    ("attention", "phase"), [(a, p) for a in ("full", "sliding") for p in ("prefill", "decode")]
)


@LAYOUTS
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([1], [1]), ([9, 70, 3], [3, 2, 3]), ([64, 65, 128], [1, 1, 4]), ([200, 5, 12], [8, 0, 7])],
    ids=str,
)
def test_attention(attention: str, phase: str, lengths: list[int], new: list[int]) -> None:
    """Ragged batches over poisoned pools (K5). P is rounded to BF16, which the formula does not do: 2^-8 of a value
    each, averaged; 0.02 is far below what one wrong key would change."""
    case = Attention(lengths, new, attention, phase, window=9, ring=32)
    np.testing.assert_allclose(f64(case.run()["out"]), case.expected(), atol=0.02, rtol=0.02)


def test_long_prefill_goes_round_the_ring() -> None:
    """A prefill of several rings: exact over fresh_kv, and afterwards the ring holds the last tokens."""
    case = Attention([10, 100], [10, 90], "sliding", "prefill", window=9, ring=32)
    found = case.run()
    np.testing.assert_allclose(f64(found["out"]), case.expected(), atol=0.02, rtol=0.02)
    for b, length in enumerate(case.lengths):
        ring = found["kv_pool_out"][int(case.inputs["ring_slot"][b])]
        for p in range(max(0, length - 9), length):
            assert torch.equal(ring[:, :, p % 32], case.kv[b][p].permute(1, 0, 2))


@LAYOUTS
@pytest.mark.parametrize("length", [511, 512, 513, 514, 515, 1024, 1025, 1026, 1030])
def test_window_counts_the_current_token(attention: str, phase: str, length: int) -> None:
    """K1: with window 513, position p sees p - 512 and not p - 513: a needle there must, or must not, show."""
    outside = length - 1 - 513
    for needle, seen in ((max(0, length - 513), True), (outside, attention == "full")):
        if needle < 0:
            continue
        case = Attention([length], [2], attention, phase, window=513, ring=528)
        before = case.run()["out"]
        changed = Attention([length], [2], attention, phase, window=513, ring=528)
        place, entry = (
            (changed.inputs["page_table"][0, needle // 64], needle % 64) if changed.full else (1, needle % 528)
        )
        assert (changed.inputs["kv_pool"][int(place), :, 1, entry].isfinite().all()) == (
            needle >= length - 514 or changed.full
        )
        changed.inputs["kv_pool"][int(place), :, 1, entry] = 1000
        after = changed.run()["out"]
        assert bool((after[1] != before[1]).any()) == seen
        # The other query stands one position earlier, and so sees one key more.
        assert bool((after[0] != before[0]).any())


@LAYOUTS
def test_sink_is_counted_once(attention: str, phase: str) -> None:
    """Keys of logit 0 and a sink of logit 0: out = n / (n + 1) * v."""
    for length in (1, 3, 200):
        case = Attention([length], [1], attention, phase, window=9, ring=32)
        case.inputs["q"].zero_()
        case.inputs["sinks"].zero_()
        case.inputs["kv_pool"][:, :, 1][case.inputs["kv_pool"][:, :, 1].isfinite()] = 1
        if case.fresh:
            case.inputs["fresh_kv"][:-1, 1] = 1
        keys = length if attention == "full" else min(length, 9)
        np.testing.assert_allclose(f64(case.run()["out"][0]), keys / (keys + 1), rtol=2**-8)


def test_a_large_sink_takes_everything() -> None:
    case = Attention([5], [1], "full", "decode", window=0, ring=0)
    case.inputs["sinks"].fill_(1e4)
    assert (case.run()["out"] == 0).all()


def test_padding_rows_are_zero() -> None:
    case = Attention([5, 7], [1, 2], "sliding", "prefill", window=9, ring=32)
    assert (case.run()["out"][-1] == 0).all()


@KINDS
@pytest.mark.parametrize("attention", ["full", "sliding"])
@pytest.mark.parametrize("has_residual", [0, 1])
def test_norm_qkv_attention(kind: str, attention: str, has_residual: int) -> None:
    """The bits of its two parts, one after the other: what the step itself writes to the pool is seen."""
    case = Attention([9, 70, 3], [3, 2, 3], attention, "decode", window=9, ring=32)
    weights, _ = Weights(kind).make("qkv", [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 128)
    projection = stream(len(case.q), 128) | weights
    projection |= {name: 1 + 0.2 * torch.randn(DIM) for name in ("q_norm", "k_norm")}
    if not has_residual:
        del projection["residual"]
    if attention == "sliding":
        projection["rope"] = rope_table(100)
    values = case.fields | {
        "weights": kind, "eps": EPS, "has_residual": has_residual, "num_heads": HEADS, "head_dim": DIM,
    }  # fmt: skip

    def run(name: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
        fields = {field.name: values[field.name] for field in OPS[name].fields}
        return call(name, fields, **{b.name: given[b.name] for b in OPS[name].node_inputs(fields)})

    given = {**case.inputs, **projection}
    pools = [given["kv_pool"].clone() for _ in range(2)]
    qkv = run("NormQkvRope", given | {"kv_pool": pools[0]})
    attended = run("SinkAttention", given | {"kv_pool": pools[0], "q": qkv.pop("q")})
    found = run("NormQkvAttention", given | {"kv_pool": pools[1]})
    assert found.keys() == {*qkv, *attended}
    assert torch.equal(found["out"], attended["out"]) and bool(found["out"].isfinite().all())
    assert not found["out"][-1].any(), "padding"
    assert found["kv_pool_out"].data_ptr() == pools[1].data_ptr()
    assert torch.equal(pools[0].view(torch.int16), pools[1].view(torch.int16))
    assert not torch.equal(pools[1].view(torch.int16), given["kv_pool"].view(torch.int16))
    if has_residual:
        assert torch.equal(found["residual_out"], qkv["residual_out"])


def test_schema_errors_name_the_binding() -> None:
    with pytest.raises(SchemaError, match="token_ids must be i32"):
        call("Embedding", {}, token_ids=torch.zeros(2), last_tokens=ints(0), table=torch.zeros(4, 64).bfloat16())
