"""SinkAttention on the GPU against a float32 formula.

Unused pages, page and ring entries, and everything outside a query's reach hold NaN (K5); page-table entries behind a
sequence's last page hold an index that no pool has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.manifest import ring_tokens
from tests.gpu.ops import run_op

DEVICE = "cuda"
DIM, GROUP = 128, 8
WINDOW, RING = 513, 528
FLINT_KV_HEADS = 4
NO_PAGE = 1 << 30

# The kernels round P to BF16 (relative 2^-8 at most, each key's its own) and the result (2^-8); the formula below
# rounds neither. With V of unit variance a row's values have the deviation sqrt(sum p^2), and P's rounding errors about
# 0.4 * 2^-8 of that (an emulation of the kernels gave 1.1 * 2^-9 with the result's own): 2^-6 of the row's root mean
# square is nine deviations. FP32 sums and ex2.approx stay far below.
RELATIVE, OF_ROW = 2**-7, 2**-6


@dataclass
class Part:
    """One sequence: `new` rows of queries behind `context` earlier tokens."""

    context: int
    new: int
    k: Tensor = field(init=False)
    """[Hkv, context + new, 128] bf16, like v."""
    v: Tensor = field(init=False)

    @property
    def length(self) -> int:
        return self.context + self.new


@dataclass
class Case:
    """A step of several sequences, its inputs, and what the kernels must return."""

    fields: dict[str, int | float | str]
    inputs: dict[str, Tensor]
    parts: list[Part]
    ring: Tensor | None
    """Ring pool after the step."""

    @property
    def window(self) -> int:
        return int(self.fields["window"])

    def rows(self, b: int) -> slice:
        start = self.inputs["query_start"]
        return slice(int(start[b]), int(start[b + 1]))

    def run(self) -> Tensor:
        """Run the op on fresh copies of the pools; check padding and the ring, and return out [T, Hq * 128]."""
        inputs = dict(self.inputs)
        if self.ring is not None:
            inputs["kv_pool"] = inputs["kv_pool"].clone()
        out = run(self.fields, inputs)
        assert not out[int(self.inputs["query_start"][-1]) :].any(), "rows of padding"
        if self.ring is not None:
            assert torch.equal(inputs["kv_pool"].view(torch.int16), self.ring.view(torch.int16)), "ring"
        return out

    def check(self) -> Tensor:
        """Run, and compare every sequence with the formula."""
        out = self.run()
        for b, part in enumerate(self.parts):
            if part.new:
                q = self.inputs["q"][self.rows(b)]
                expected = reference(q, part, self.inputs["sinks"], self.window)
                assert_close(
                    out[self.rows(b)].view(expected.shape), expected, f"sequence {b}: {part.context}+{part.new}"
                )
        return out


def run(fields: Mapping[str, int | float | str], inputs: Mapping[str, Tensor]) -> Tensor:
    """Run the op; its out."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # Old keys are read before the predecessor's end: see attention.h.
    return run_op("SinkAttention", fields, inputs)["out"]


def reference(q: Tensor, part: Part, sinks: Tensor, window: int) -> Tensor:
    """The formula in float32, unrounded: q [n, Hq, 128] bf16 -> [n, Hq, 128] f32."""
    k, v = part.k.float(), part.v.float()
    heads = q.shape[1]
    keys = torch.arange(part.length, device=q.device)
    results = []
    block = max(1, (1 << 27) // (heads * part.length))
    for row in range(0, part.new, block):
        rows = q[row : row + block].float().view(-1, heads // GROUP, GROUP, DIM).permute(1, 2, 0, 3)
        logits = rows @ k.unsqueeze(1).transpose(-1, -2) * DIM**-0.5
        distance = torch.arange(part.context + row, part.context + row + rows.shape[2], device=q.device)[:, None] - keys
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        logits.masked_fill_(hidden, -torch.inf)
        sink = sinks.view(heads // GROUP, GROUP, 1, 1).expand(*logits.shape[:-1], 1)
        p = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
        results.append((p @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(-1, heads, DIM))
    return torch.cat(results)


def assert_close(out: Tensor, expected: Tensor, what: str) -> None:
    error = (out.float() - expected).abs()
    allowed = RELATIVE * expected.abs() + OF_ROW * expected.square().mean(-1, keepdim=True).sqrt() + 1e-30
    ratio = torch.where(error.isnan(), torch.inf, error / allowed)
    worst = int(ratio.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape)]
    assert ratio.max() <= 1, f"{what}: error {float(ratio.max()):.3g} times the tolerance at row, head, dim {place}"


def make_case(
    attention: str,
    phase: str,
    sequences: Sequence[tuple[int, int]],
    *,
    kv_heads: int = FLINT_KV_HEADS,
    window: int = WINDOW,
    ring: int = RING,
    padding: int = 0,
    needle: int | None = None,
    sink: float | None = None,
    seed: int = 0,
) -> Case:
    """A random step.

    Args:
        sequences: (earlier tokens, new tokens) of each.
        padding: rows behind the last sequence's.
        needle: distance from each sequence's last query at which one key outweighs all others.
        sink: of all heads; random if None.
    """
    parts = [Part(*s) for s in sequences]
    total = sum(p.new for p in parts)
    heads = kv_heads * GROUP
    full = attention == "full"
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    q = normal(total + padding, heads, DIM)
    q[total:] = math.nan
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.new)
        part.k, part.v = normal(kv_heads, part.length, DIM), normal(kv_heads, part.length, DIM)
        if needle is not None and part.length - 1 - needle >= 0:
            q[starts[-2] : starts[-1]] = 1.0
            part.k[:, part.length - 1 - needle] = 1.0
            part.v[:, part.length - 1 - needle] = 100.0
    sinks = torch.randn(heads, generator=generator, device=DEVICE) if sink is None else torch.full((heads,), sink)

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    positions = [p.context + i for p in parts for i in range(p.new)] + [0] * padding
    inputs = {
        "q": q,
        "sinks": sinks.to(DEVICE),
        "positions": integers(positions),
        "query_start": integers(starts),
        "seq_lens": integers([p.length for p in parts]),
    }
    after = None
    if full:
        inputs["page_table"], inputs["kv_pool"] = paged_pool(parts, kv_heads, seed)
    else:
        inputs["ring_slot"] = integers(list(reversed(range(1, len(parts) + 1))))
        pool = torch.full((len(parts) + 2, kv_heads, 2, ring, DIM), math.nan, dtype=torch.bfloat16, device=DEVICE)
        after = pool.clone()
        fresh = normal(total + padding, 2, kv_heads, DIM)
        fresh[total:] = math.nan
        for part, slot, start in zip(parts, inputs["ring_slot"].tolist(), starts, strict=False):
            prefill = phase == "prefill"
            stored = torch.arange(max(0, part.context - window + 1), part.context if prefill else part.length)
            both = torch.stack([part.k, part.v], 1)
            pool[slot][:, :, stored % ring] = both[:, :, stored.to(DEVICE)]
            after[slot] = pool[slot]
            if prefill:
                fresh[start : start + part.new] = both[:, :, part.context :].permute(2, 1, 0, 3)
                kept = torch.arange(part.length - min(part.new, ring), part.length)
                after[slot][:, :, kept % ring] = both[:, :, kept.to(DEVICE)]
        inputs["kv_pool"] = pool
        if phase == "prefill":
            inputs["fresh_kv"] = fresh
    fields: dict[str, int | float | str] = {
        "attention": attention,
        "phase": phase,
        "window": 0 if full else window,
        "num_kv_heads": kv_heads,
    }
    return Case(fields, inputs, parts, after)


def paged_pool(parts: Sequence[Part], kv_heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Page table and pool: pages in random order, everything else NaN."""
    pages = [-(-p.length // PAGE_TOKENS) for p in parts]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((len(parts), max(1, *pages) + 2 if len(pages) > 1 else pages[0] + 2), NO_PAGE, dtype=torch.int32)
    pool = torch.full((len(order), kv_heads, 2, PAGE_TOKENS, DIM), math.nan, dtype=torch.bfloat16, device=DEVICE)
    used = 0
    for part, row, count in zip(parts, table, pages, strict=True):
        row[:count] = order[used : used + count]
        both = torch.full((kv_heads, 2, count * PAGE_TOKENS, DIM), math.nan, dtype=torch.bfloat16, device=DEVICE)
        both[:, 0, : part.length], both[:, 1, : part.length] = part.k, part.v
        paged = both.view(kv_heads, 2, count, PAGE_TOKENS, DIM).permute(2, 0, 1, 3, 4)
        pool[row[:count].long().to(DEVICE)] = paged
        used += count
    return table.to(DEVICE), pool


EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 256, 257, *range(511, 516), *range(1024, 1031))
CONTEXTS = (*EDGES, 4096, 100_000, 262_144)
CHUNKS = (1, 2, 3, 7, 8, 9, 33, 64, 513, 2048, 8192)
PRIOR = (0, 1, 512, 1000)


@pytest.mark.parametrize("length", CONTEXTS)
@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_decode_of_one_token(attention: str, length: int) -> None:
    make_case(attention, "decode", [(length - 1, 1)]).check()


@pytest.mark.parametrize("new", range(1, 9))
@pytest.mark.parametrize("length", [8, 64, 65, 513, 516, 520, 521, 1024, 5003])
@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_decode_of_several_tokens(attention: str, length: int, new: int) -> None:
    make_case(attention, "decode", [(length - new, new)]).check()


@pytest.mark.parametrize("attention", ["full", "sliding"])
@pytest.mark.parametrize("new", [2, 4, 8])
def test_decode_of_several_tokens_at_100k(attention: str, new: int) -> None:
    make_case(attention, "decode", [(100_000 - new, new)]).check()


@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_decode_of_a_ragged_batch(attention: str) -> None:
    """Different lengths and numbers of tokens, sequences without rows, rows of padding."""
    sequences = [(700, 3), (0, 1), (900, 0), (4000, 1), (62, 8), (0, 0), (511, 2), (100, 5)]
    make_case(attention, "decode", sequences, padding=4).check()
    make_case(attention, "decode", sequences[:3], padding=1).check()


@pytest.mark.parametrize("batch", [16, 17, 33, 300])
@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_decode_of_a_large_batch(attention: str, batch: int) -> None:
    make_case(attention, "decode", [((37 * b) % 1500, 1) for b in range(batch)], padding=2).check()


@pytest.mark.parametrize("attention", ["full", "sliding"])
@pytest.mark.parametrize("batch", [8, 40])
def test_decode_bits_are_the_same_on_repeat_and_alone(attention: str, batch: int) -> None:
    """Alone, too, the step has more than 16 rows in the larger case: the docs name that switch of kernels."""
    sequences = [((7919 * b) % 3000, 1 + b % 2) for b in range(batch)]
    case = make_case(attention, "decode", sequences)
    out = case.run()
    for _ in range(3):
        assert torch.equal(case.run(), out)
    padding = 17 if out.shape[0] > 16 else 0
    for b in range(0, batch, 5):
        rows = case.rows(b)
        inputs = dict(case.inputs)
        pad = inputs["q"].new_zeros(padding, *inputs["q"].shape[1:])
        inputs["q"] = torch.cat([inputs["q"][rows], pad])
        inputs["positions"] = torch.cat([inputs["positions"][rows], inputs["positions"].new_zeros(padding)])
        inputs["query_start"] = inputs["query_start"].new_tensor([0, rows.stop - rows.start])
        for name in ("seq_lens", "page_table", "ring_slot"):
            if name in inputs:
                inputs[name] = inputs[name][b : b + 1].contiguous()
        alone = run(case.fields, inputs)
        assert torch.equal(alone[: rows.stop - rows.start], out[rows]), sequences[b]


@pytest.mark.parametrize("sink", [-20.0, 0.0, 6.0, 12.0])
@pytest.mark.parametrize("length", [100, 300, 600, 3000, 9000])
def test_the_sink_counts_once_for_any_number_of_splits(length: int, sink: float) -> None:
    """Lengths that give one split, a few, and as many as a GPU takes; a large sink would show if it counted twice."""
    make_case("full", "decode", [(length - 1, 1)], sink=sink).check()
    make_case("full", "decode", [(length - 1, 1)] + [(1, 1)] * 20, sink=sink).check()


@pytest.mark.parametrize("window", [569, 570, 700, 5000])
def test_a_window_that_is_split(window: int) -> None:
    """Wider than Flint's, so that one token's keys are shared by several blocks."""
    ring = -(-(window + 7) // 16) * 16
    make_case("sliding", "decode", [(1999, 1), (6000, 1)], window=window, ring=ring).check()


def test_windows_that_leave_blocks_of_a_cluster_without_keys() -> None:
    """Up to 16 tokens, one a sequence: blocks of a cluster share a window by chunks of 16 keys, and some have none."""
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 130)
    for length in lengths:
        make_case("sliding", "decode", [(length - 1, 1)], sink=6.0).check()
    make_case("sliding", "decode", [(length - 1, 1) for length in lengths]).check()


@pytest.mark.parametrize("ring", [RING, RING + 1, RING + 5, RING + 16, ring_tokens(WINDOW)])
def test_wrapped_rings_with_the_new_key_anywhere_in_its_chunk(ring: int) -> None:
    """A step's own key is read later than the rest of its chunk; rings end within a chunk or between two."""
    for length in range(1050, 1066):
        make_case("sliding", "decode", [(length - 1, 1)], ring=ring, needle=0).check()
    make_case("sliding", "decode", [(1049 + i, 1) for i in range(16)], ring=ring).check()


@pytest.mark.parametrize("window", [560, 561, 562])
def test_windows_around_the_widest_that_a_cluster_holds(window: int) -> None:
    """A window that begins with the last key of a chunk has the most chunks."""
    ring = -(-(window + 7) // 16) * 16
    make_case("sliding", "decode", [(1984 + i, 1) for i in range(16)], window=window, ring=ring).check()


def test_windows_in_steps_of_as_many_tokens_as_sequences() -> None:
    """Rows of padding, sequences without rows, and such as have several: each row has its own cluster."""
    make_case("sliding", "decode", [(700, 1), (900, 0), (0, 1), (1100, 1)], padding=1).check()
    make_case("sliding", "decode", [(700, 3), (0, 0), (900, 0)]).check()
    make_case("sliding", "decode", [(0, 0), (1200, 8), (0, 2), *[(5, 0)] * 10], padding=3).check()
    make_case("sliding", "decode", [(1020, 8), *[(0, 0)] * 7], window=3, ring=37).check()


def test_bits_of_windows_are_the_same_on_repeat_and_alone() -> None:
    """Of steps of as many tokens as sequences."""
    case = make_case("sliding", "decode", [((7919 * b) % 1500, 1) for b in range(16)])
    out = case.check()
    for _ in range(3):
        assert torch.equal(case.run(), out)
    for b in range(16):
        assert torch.equal(alone(case, b, 1), out[case.rows(b)]), case.parts[b]


def test_windows_in_a_graph() -> None:
    """The launch of clusters, overlapping its predecessor, gives in a replayed CUDA graph what it gives by itself."""
    case = make_case("sliding", "decode", [(700, 1), (20, 1), (0, 1)])
    out = run_op("SinkAttention", case.fields, case.inputs, use_graph=True)["out"]
    assert torch.equal(out, case.check())


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("length", [512, 513, 514, 515, 1024, 1026, 1030, 2000])
def test_a_needle_at_the_window_edge(phase: str, length: int) -> None:
    for needle in (0, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1):
        for new in (1, 4):
            make_case("sliding", phase, [(length - new, new)], needle=needle).check()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("prior", PRIOR)
@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_prefill(attention: str, prior: int, chunk: int) -> None:
    make_case(attention, "prefill", [(prior, chunk)]).check()


@pytest.mark.parametrize(("prior", "chunk"), [(4096 - 8, 9), (100_000 - 513, 513), (262_144 - 65, 65)])
@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_prefill_behind_a_long_context(attention: str, prior: int, chunk: int) -> None:
    make_case(attention, "prefill", [(prior, chunk)]).check()


def most_splits(tokens: int, sequences: int, kv_heads: int = FLINT_KV_HEADS) -> int:
    """Over how many blocks a full layer's prefill may split the keys of 16 tokens: S in attention.h."""
    groups = (tokens + 15 * min(tokens, sequences)) // 16
    splits = 768 // (kv_heads * groups)
    return 1 if splits < 4 else min(splits, 128)


@pytest.mark.parametrize("chunk", [1, 9, 16, 17, 64, 100, 256, 512, 1024, 1537])
@pytest.mark.parametrize("prior", [940, 1024, 4096, 100_000])
def test_prefill_of_a_chunk_behind_many_keys(prior: int, chunk: int) -> None:
    """Few tokens have their keys split; the chunks have from 128 splits at most down to none."""
    make_case("full", "prefill", [(prior, chunk)]).check()


@pytest.mark.parametrize("sink", [-20.0, 6.0, 12.0])
@pytest.mark.parametrize("padding", [0, 30, 120, 250, 400, 700, 1600])
@pytest.mark.parametrize("length", [960, 961, 1024, 1030, 70_000])
def test_prefill_counts_the_sink_once_for_any_number_of_splits(length: int, padding: int, sink: float) -> None:
    """K3: one to 128 splits, by rows of padding; a large sink would show if each split counted it."""
    make_case("full", "prefill", [(length - 7, 7)], padding=padding, sink=sink).check()


def test_prefill_of_a_ragged_batch_behind_many_keys() -> None:
    """Sequences whose keys are split beside some whose are not, blocks of a sequence that have different numbers of
    splits (1,472 keys are 23 tiles), and rows of padding."""
    sequences = [(4096, 17), (700, 1), (900, 0), (0, 0), (9000, 64), (1000, 30), (0, 1), (100_000, 9), (2040, 16)]
    make_case("full", "prefill", sequences, padding=5).check()
    make_case("full", "prefill", [(1450, 40), (940, 40)]).check()
    make_case("full", "prefill", [(1500 + 61 * b, 1 + b % 3) for b in range(40)], padding=1).check()


def alone(case: Case, b: int, tokens: int) -> Tensor:
    """One sequence in a step of its own of so many tokens, the others padding; its rows' out."""
    rows, inputs = case.rows(b), dict(case.inputs)
    count = rows.stop - rows.start
    for name in ("q", "positions"):
        own = inputs[name][rows]
        inputs[name] = torch.cat([own, own.new_zeros(tokens - count, *own.shape[1:])])
    inputs["query_start"] = inputs["query_start"].new_tensor([0, count])
    for name in ("seq_lens", "page_table", "ring_slot"):
        if name in inputs:
            inputs[name] = inputs[name][b : b + 1].contiguous()
    return run(case.fields, inputs)[:count]


@pytest.mark.parametrize(("rows", "splits"), [(1, 24), (100, 9), (200, 6), (320, 4), (400, 1)])
def test_prefill_bits_are_the_same_alone_and_in_a_batch(rows: int, splits: int) -> None:
    """In steps of the same S, whatever their numbers of tokens and sequences are."""
    sequences = [(5000, rows), (100_000, 1), (700, 33), (1500, rows), (3000, 17)]
    case = make_case("full", "prefill", sequences)
    tokens = len(case.inputs["q"])
    assert most_splits(tokens, len(sequences)) == splits
    out = case.check()
    same_splits = [t for t in range(tokens // 2, 4 * tokens) if most_splits(t, 1) == splits]
    for b, part in enumerate(case.parts):
        for t in (same_splits[0], same_splits[-1]):
            if t >= part.new:
                assert torch.equal(alone(case, b, t), out[case.rows(b)]), f"sequence {b} in {t} tokens"


def test_prefill_of_few_keys_has_the_bits_of_no_split() -> None:
    """Up to 960 keys, in steps of any number of tokens."""
    case = make_case("full", "prefill", [(920, 40)])
    outs = [alone(case, 0, tokens) for tokens in (40, 200, 700, 2000)]
    assert [most_splits(tokens, 1) for tokens in (40, 200, 700, 2000)] == [64, 14, 4, 1]
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@pytest.mark.parametrize("sink", [-20.0, 6.0, 12.0])
@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_prefill_counts_the_sink(attention: str, sink: float) -> None:
    """K4: whatever path prefill takes, it knows sinks."""
    make_case(attention, "prefill", [(0, 1), (3, 40), (700, 300)], sink=sink).check()


@pytest.mark.parametrize("chunk", [1, 512, 513, 514, 527, 528, 529, 1027])
def test_sliding_prefill_around_the_window_and_the_ring(chunk: int) -> None:
    for prior in (0, 300, 513, 1200):
        make_case("sliding", "prefill", [(prior, chunk)]).check()


@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_prefill_of_a_ragged_batch(attention: str) -> None:
    """Sequences without rows, single tokens beside long chunks, rows of padding."""
    sequences = [(0, 17), (700, 1), (300, 0), (0, 0), (63, 65), (1000, 530), (0, 1), (5, 16)]
    make_case(attention, "prefill", sequences, padding=5).check()
    make_case(attention, "prefill", [(b % 7, b % 4) for b in range(100)], padding=1).check()


@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_prefill_bits_are_the_same_on_repeat(attention: str) -> None:
    for sequences in ([(1000, 300), (0, 700)], [(9000, 100), (100_000, 1)], [(5000, 5)]):
        case = make_case(attention, "prefill", sequences)
        out = case.run()
        for _ in range(3):
            assert torch.equal(case.run(), out)


def test_prefill_of_few_tokens_in_a_graph() -> None:
    """Both kernels, one overlapping the other, give in a replayed CUDA graph what they give when launched."""
    case = make_case("full", "prefill", [(20_000, 100), (3000, 5)])
    out = run_op("SinkAttention", case.fields, case.inputs, use_graph=True)["out"]
    assert torch.equal(out, case.check())


@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_the_shape_of_nano(attention: str) -> None:
    """16 query heads, 2 KV heads, a window and a ring that are shorter than a tile."""
    sizes = {"kv_heads": 2, "window": 33, "ring": 48}
    for length in (1, 30, 33, 34, 47, 48, 49, 97, 700):
        for new in (1, 3, 8):
            if new <= length:
                make_case(attention, "decode", [(length - new, new)], **sizes).check()
        make_case(attention, "prefill", [(length, 40), (length // 2, 130)], **sizes).check()


def test_decode_continues_a_prefill() -> None:
    """Sliding: the ring that prefill leaves is what decode then reads, in any number of chunks."""
    for chunk in (100, 528, 900):
        case = make_case("sliding", "prefill", [(0, chunk), (400, chunk)])
        case.run()
        assert case.ring is not None
        decode = make_case("sliding", "decode", [(p.length, 1) for p in case.parts], seed=1)
        for b, (part, before) in enumerate(zip(decode.parts, case.parts, strict=True)):
            part.k[:, :-1], part.v[:, :-1] = before.k, before.v
            slot = int(case.inputs["ring_slot"][b])
            now = case.ring[slot]
            now[:, 0, before.length % RING], now[:, 1, before.length % RING] = part.k[:, -1], part.v[:, -1]
        decode.inputs["kv_pool"] = case.ring
        decode.ring = case.ring.clone()
        decode.check()
