"""NormQkvAttention on the GPU against the reference op; its parts alone are in test_decode_ops and test_attention.

Pools hold NaN wherever a step may not read: pages and ring entries that nobody wrote, what a window hides, and the
places of the step's own K and V; page-table entries behind a sequence's last page hold an index that no pool has, and
rows of padding are NaN. Values are the reference's; how far a kernel may be from them says the torch oracle, with K and
V as the reference leaves them in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS, FieldValue
from flint_runtime.executors.reference_ops import REFERENCE_OPS
from flint_runtime.executors.reference_weights import WeightCache
from flint_runtime.manifest import ring_tokens
from tests.gpu import torch_oracle as oracle
from tests.gpu.inputs import FORMATS
from tests.gpu.ops import run_op, same_bits
from tests.gpu.test_attention import NO_PAGE
from tests.gpu.test_decode_ops import SHAPES, places, qkv_case, qkv_weights, written

OP = "NormQkvAttention"
DEVICE = "cuda"
WINDOWS = {"flint": (513, ring_tokens(513)), "nano": (33, ring_tokens(33))}
"""Keys of a window, tokens of a ring."""
CONTEXTS = (0, 1, 63, 64, 65, 511, 512, 513, 514, 515, 1023, 1024, 1537, 4000)
STEPS = {
    "1/1": [1],
    "2/2": [1] * 2,
    "3/1": [3],
    "7/3": [2, 1, 4],
    "8/1": [8],
    "8/8": [1] * 8,
    "9/9": [1] * 9,
    "16/16": [1] * 16,
    "17/17": [1] * 17,
    "24/9": [1, 2, 3, 4, 5, 4, 3, 1, 1],
}
"""New tokens of each sequence, by tokens and sequences."""

Tensors = dict[str, Tensor]


@dataclass
class Layer:
    """A layer's weights, which serve all steps."""

    shape: str
    fmt: str
    weights: Tensors
    cache: WeightCache = field(default_factory=WeightCache)

    def step(
        self,
        attention: str,
        sequences: Sequence[tuple[int, int]],
        *,
        padding: int = 0,
        first: bool = False,
        ring: int = 0,
    ) -> Step:
        """A random step.

        Args:
            sequences: (earlier tokens, new tokens) of each.
            padding: rows behind the last sequence's.
            first: as the first layer, without a residual.
            ring: tokens of a ring; 0 for the usual number.
        """
        window, usual = WINDOWS[self.shape]
        starts, news = [start for start, _ in sequences], [new for _, new in sequences]
        fields, inputs = qkv_case(
            SHAPES[self.shape], self.fmt, news, starts, attention, "decode", first, padding, ring or usual, self.weights
        )
        del fields["phase"]
        fields["window"] = window if attention == "sliding" else 0
        generator = torch.Generator().manual_seed(sum(starts))
        inputs["sinks"] = torch.randn(SHAPES[self.shape]["heads"], generator=generator)
        inputs["seq_lens"] = torch.tensor([start + new for start, new in sequences], dtype=torch.int32)
        for b, (start, _) in enumerate(sequences):
            seen = torch.arange(max(0, start - window + 1) if attention == "sliding" else 0, start)
            place, entry = places(inputs, torch.full_like(seen, b), seen)
            _, kv_heads, kinds, _, dim = inputs["kv_pool"].shape
            old = torch.randn(len(seen), kv_heads, kinds, dim, generator=generator)
            inputs["kv_pool"][place, :, :, entry] = old.bfloat16()
            if attention == "full":
                inputs["page_table"][b, -(-int(inputs["seq_lens"][b]) // PAGE_TOKENS) :] = NO_PAGE
        for name in ("delta", "residual"):
            if name in inputs:
                inputs[name][sum(news) :] = torch.nan
        return Step(self, fields, inputs)


@dataclass
class Step:
    """A step's node, its inputs on the CPU."""

    layer: Layer
    fields: dict[str, FieldValue]
    inputs: Tensors

    @property
    def rows(self) -> int:
        """Without padding."""
        return int(self.inputs["query_start"][-1])

    def run(self, use_graph: bool = False) -> Tensors:
        """The op's outputs, from fresh copies of the inputs."""
        device = {name: tensor.to(DEVICE, copy=True) for name, tensor in self.inputs.items()}
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # Old keys are read before the predecessor's end: see attention.h.
        return {name: tensor.cpu() for name, tensor in run_op(OP, self.fields, device, use_graph).items()}

    def check(self, all_of: float = oracle.ATTENTION_ALL) -> Tensors:
        """Run, and compare everything that may be read, and everything that must not be written.

        Args:
            all_of: for attention's result; see `oracle.check`.
        """
        found = self.run()
        before = self.inputs["kv_pool"]
        copies = {**self.inputs, "kv_pool": before.clone()}
        expected = REFERENCE_OPS[OP](self.fields, copies, self.layer.cache)
        projection = oracle.OPS["NormQkvRope"](self.fields, {n: t.to(DEVICE) for n, t in self.inputs.items()})
        bounds = {name: bound.allowed.cpu() for name, bound in projection.items()}
        bounds["out"] = self._bound(projection["q"].value, projection["v"].allowed, expected["kv_pool_out"])
        assert not found["out"][self.rows :].any(), "rows of padding"
        changed = expected["kv_pool_out"].view(torch.int16) != before.view(torch.int16)
        assert torch.equal(found["kv_pool_out"].isnan(), expected["kv_pool_out"].isnan()), "places in the pool"
        assert same_bits(found["kv_pool_out"][~changed], before[~changed]), "old K and V"
        for both in (expected, found):
            both["k"], both["v"] = written(self.inputs, both)
        for name in sorted(expected.keys() & bounds.keys()):
            value, wanted, bound = (x[name][: self.rows] for x in (found, expected, bounds))
            if name == "out":
                # The result of many keys is small, that of a few is not: let every row count alike.
                size = wanted.float().square().mean(-1, keepdim=True).sqrt()
                oracle.check(value / size, oracle.Bounded(wanted / size, bound / size), all_of, name)
            else:
                oracle.check(value, oracle.Bounded(wanted, bound), oracle.ALL, name)
        return found

    def _bound(self, q: Tensor, own_v: Tensor, pool: Tensor) -> Tensor:
        """How far attention of q over the reference's pool may be off, [rows, Hq * 128]; own_v: the rows' V."""
        start, window = self.inputs["query_start"].tolist(), int(self.fields["window"])
        bounds = []
        for b, length in enumerate(self.inputs["seq_lens"].tolist()):
            new = start[b + 1] - start[b]
            if new:
                seen = torch.arange(max(0, length - new - window + 1) if window else 0, length)
                place, entry = places(self.inputs, torch.full_like(seen, b), seen)
                k, v = (pool[place, :, kind, entry].to(DEVICE) for kind in (0, 1))
                rows, sinks = slice(start[b], start[b + 1]), self.inputs["sinks"].to(DEVICE)
                bounds.append(oracle.attention(q[rows], k, v, sinks, window, own_v[rows]).allowed.cpu())
        return torch.cat(bounds)

    def alone(self, b: int, tokens: int, sequences: int) -> Step:
        """One sequence in a step of so many tokens, rows of padding behind, and sequences, the others without rows."""
        start = self.inputs["query_start"].tolist()
        rows, inputs = slice(start[b], start[b + 1]), dict(self.inputs)
        new = rows.stop - rows.start
        for name in ("delta", "residual", "positions"):
            if name in inputs:
                own = inputs[name][rows]
                inputs[name] = torch.cat([own, own.new_zeros(tokens - new, *own.shape[1:])])
        inputs["query_start"] = torch.tensor([0] + [new] * sequences, dtype=torch.int32)
        for name in ("seq_lens", "page_table", "ring_slot"):
            if name in inputs:
                inputs[name] = inputs[name][[b] * sequences].contiguous()
        return Step(self.layer, self.fields, inputs)


@pytest.fixture(scope="module", params=[(shape, fmt) for shape in SHAPES for fmt in FORMATS], ids="-".join)
def layer(request: pytest.FixtureRequest) -> Iterator[Layer]:
    shape, fmt = request.param
    made = Layer(shape, fmt, qkv_weights(SHAPES[shape], fmt, np.random.default_rng(0)))
    yield made
    made.weights.clear()


ATTENTION = pytest.mark.parametrize("attention", ["full", "sliding"])


def contexts(count: int, shift: int) -> list[int]:
    """Of a batch: all of CONTEXTS in turn."""
    return [CONTEXTS[(shift + i) % len(CONTEXTS)] for i in range(count)]


@ATTENTION
@pytest.mark.parametrize("news", STEPS.values(), ids=STEPS)
def test_steps(news: list[int], attention: str, layer: Layer) -> None:
    """Every context in the first sequence's place, or (batches) two turns of them; with and without padding."""
    for shift in range(0, len(CONTEXTS), 1 if len(news) == 1 else 7):
        sequences = list(zip(contexts(len(news), shift), news, strict=True))
        layer.step(attention, sequences, padding=shift % 2 * 2).check()


@ATTENTION
@pytest.mark.parametrize("news", [STEPS[name] for name in ("1/1", "2/2", "7/3", "9/9")])
def test_the_first_layer(news: list[int], attention: str, layer: Layer) -> None:
    """It has no residual, in or out."""
    found = layer.step(attention, list(zip(contexts(len(news), 5), news, strict=True)), first=True).check()
    assert found.keys() == {"out", "kv_pool_out", "k", "v"}


@ATTENTION
def test_sequences_without_rows(attention: str, layer: Layer) -> None:
    sequences = [(700, 3), (900, 0), (0, 1), (0, 0), (62, 8), (4000, 0)]
    layer.step(attention, sequences, padding=2).check()
    layer.step(attention, sequences[1:3], padding=1).check()
    layer.step(attention, [(0, 0), (1200, 2)]).check()


@pytest.mark.parametrize("more", [0, 1, 5, 16])
def test_wrapped_rings(more: int, layer: Layer) -> None:
    """The step's keys anywhere in a ring, also on both sides of its end."""
    ring = WINDOWS[layer.shape][1] + more
    for count in (1, 9, 16):
        layer.step("sliding", [(2 * ring - 8 + i, 1) for i in range(count)], ring=ring).check()
    for new in (2, 5, 8):
        layer.step("sliding", [(2 * ring - new + 1, new)], ring=ring).check()
    layer.step("sliding", [(ring - 3, 4), (3 * ring - 1, 2)], ring=ring).check()


@ATTENTION
def test_a_needle_at_the_window_edge(attention: str, layer: Layer) -> None:
    """The oldest key that a query sees, and (poisoned with NaN where the window hides it) the one before it.

    One key makes nearly all of the result, so the error of its logit is not averaged.
    """
    window = WINDOWS[layer.shape][0]
    for context in (window - 2, window - 1, window, 3 * window):
        for new in (1, 2):
            step = layer.step(attention, [(context, new)])
            oldest = max(0, context - window + 1)
            place, entry = places(step.inputs, torch.tensor([0]), torch.tensor([oldest]))
            step.inputs["kv_pool"][place, :, 1, entry] = 1000
            step.check(oracle.FLIPPED)


@ATTENTION
@pytest.mark.parametrize("news", STEPS.values(), ids=STEPS)
def test_bits_are_the_same_on_repeat_and_in_a_graph(news: list[int], attention: str, layer: Layer) -> None:
    step = layer.step(attention, list(zip(contexts(len(news), 9), news, strict=True)), padding=1)
    first = step.run()
    for use_graph in (False, True, True):
        for name, value in step.run(use_graph).items():
            assert same_bits(value, first[name]), name


@ATTENTION
@pytest.mark.parametrize(
    ("news", "tokens"),
    [([1] * 8, (2, 8)), ([2, 1, 4], (4, 8)), ([1] * 16, (9, 16)), ([2] * 6, (9, 16)), ([1] * 17, (17, 40))],
    ids=["8/8", "7/3", "16/16", "12/6", "17/17"],
)
def test_bits_are_the_same_alone_and_in_a_batch(
    news: list[int], tokens: tuple[int, int], attention: str, layer: Layer
) -> None:
    """In steps that share kernels: those of 2 to 8, 9 to 16 and more tokens, with as many sequences or with fewer."""
    step = layer.step(attention, list(zip(contexts(len(news), 6), news, strict=True)))
    found = step.run()
    found["k"], found["v"] = written(step.inputs, found)
    start = step.inputs["query_start"].tolist()
    for b, new in enumerate(news):
        for count in tokens:
            one = step.alone(b, count, count if step.rows == len(news) and step.rows <= 16 else 1)
            alone = one.run()
            alone["k"], alone["v"] = written(one.inputs, alone)
            for name in ("out", "residual_out", "k", "v"):
                assert same_bits(alone[name][:new], found[name][start[b] : start[b + 1]]), (name, b, count)
