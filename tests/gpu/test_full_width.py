"""The released model with random weights, 49 layers and the first 4 of them, against the torch oracle on the same GPU.

Routers of random weights choose by near-ties: a difference of one rounding changes experts, and from there on two
correct runs go different ways. So a run is compared twice:

- node by node: the oracle gets what the node really read, and the per-op allowances hold at every depth. (K and V are
  looked up in the pools, or in fresh_kv.) Of NormMoe, tokens without a near-tie count.
- as a whole: the oracle runs each sequence at once, without pools, pages, rings, chunks or batches, and takes the
  experts that the run chose (computed again from what each router read). What is left are roundings.

Two such runs differ like a random walk of some 16 roundings a layer. One rounding, with its counterpart, is off by
2^-9.7 of the value in the mean: DRIFT. The oracle against itself with perturbed FP32 sums gave 0.0095 of the logits'
deviation after 4 layers, 0.018 after 12 and 0.034 after 49 (CPU, narrow models), the largest of 50,000 logits five
times that: the formula says 0.0096, 0.017 and 0.034. The tests allow twice that in the root mean square, eight times
for the largest of 10^7.

Every pool starts as NaN (K5), and pages stand in random order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.executors.graph_file import GraphNode
from flint_runtime.executors.step import RowSampling, SequencePart, Step, build_step
from flint_runtime.manifest import PHASES, Limits, Phase, WeightFormat
from tests.bench import full_size
from tests.gpu import torch_oracle as oracle
from tests.gpu.graph_run import GraphRun, Pool, bindings, first_layers, first_layers_config, make_states
from tests.gpu.inputs import FORMATS
from tests.shapes import FLINT

LIMITS = Limits(max_batch=40, max_context=4096, prefill_chunk=2048)
POOL = Pool(pages=200, slots=LIMITS.max_batch + 1)
DRIFT, ROUNDINGS = 0.0012, 16
DEVICE = "cuda"

Weights = dict[str, Tensor]
Taps = dict[str, Tensor]


@pytest.fixture(scope="module", params=FORMATS)
def weights(request: pytest.FixtureRequest) -> Iterator[tuple[WeightFormat, Weights]]:
    """All 49 layers: 22 GB in NVFP4, 80 GB in BF16."""
    torch.manual_seed(0)
    fmt: WeightFormat = request.param
    tensors = {t.name: full_size.random_values(t, fmt) for file in full_size.files(fmt) for t in file.tensors}
    yield fmt, tensors
    tensors.clear()
    torch.cuda.empty_cache()


@dataclass
class Track:
    """A sequence: its tokens, its place in the pools, and what was seen of it."""

    token_ids: Tensor
    pages: list[int]
    ring_slot: int
    length: int = 0
    rows: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)


class Model:
    """Some layers' graphs in the plugin host, and the sequences that they have seen."""

    def __init__(self, fmt: WeightFormat, weights: Weights, layers: int, lengths: Sequence[int]) -> None:
        self.config = first_layers_config(FLINT, layers)
        self.weights = weights
        files = {phase: first_layers(full_size.graph_file(fmt, phase), layers) for phase in PHASES}
        states = make_states(files["decode"], weights, POOL)
        memory = {name: weights[name] for name in files["decode"].inputs if name in weights} | states
        self.runs = {phase: GraphRun(files[phase], self.config, LIMITS, phase, memory) for phase in PHASES}
        order = torch.randperm(POOL.pages).tolist()
        self.sequences = []
        for slot, length in enumerate(lengths):
            pages = [order.pop() for _ in range(-(-length // PAGE_TOKENS))]
            ids = torch.randint(0, FLINT.vocab_size, (length,))
            self.sequences.append(Track(ids, pages, len(lengths) - slot))

    def step(self, phase: Phase, news: dict[int, int], rows: int = 4) -> tuple[Step, Taps]:
        """Run the next `news[i]` tokens of each sequence i, with logits of its last `rows` tokens, and note them."""
        parts = []
        for index, new in news.items():
            seq = self.sequences[index]
            end = seq.length + new
            wanted = [(i, RowSampling()) for i in range(max(0, new - rows), new)]
            ids = seq.token_ids[seq.length : end].tolist()
            parts.append(SequencePart(ids, seq.length, seq.pages[: -(-end // PAGE_TOKENS)], seq.ring_slot, wanted))
        step = build_step(parts)
        taps = self.runs[phase].run(step)
        logits = torch.split(taps["logits"], [len(part.rows) for part in parts])
        for (index, new), part, found in zip(news.items(), parts, logits, strict=True):
            seq = self.sequences[index]
            seq.rows += [seq.length + i for i, _ in part.rows]
            seq.logits.append(found)
            seq.length += new
        for node in self.runs[phase].file.nodes:
            if node.op == "NormMoe":
                read = oracle.router_logits(node.fields, bindings(node, taps)[0])
                chosen = oracle.choose(read, self.config.num_experts_per_tok)
                for index, mine in zip(news, torch.split(chosen, list(news.values())), strict=True):
                    self.sequences[index].chosen.setdefault(int(node.name.split(".")[1]), []).append(mine)
        return step, taps

    def check_logits(self) -> None:
        """Every sequence's logits against the oracle's run of the whole sequence."""
        drift = DRIFT * math.sqrt(ROUNDINGS * self.config.num_hidden_layers)
        for index, seq in enumerate(self.sequences):
            chosen = {layer: torch.cat(parts) for layer, parts in seq.chosen.items()}
            ids = seq.token_ids[: seq.length].to(DEVICE)
            expected = oracle.forward(self.config, self.weights, ids, seq.rows, chosen)
            found = torch.cat(seq.logits)
            assert bool(found.isfinite().all())
            spread = expected.std(-1, keepdim=True)
            error = (found - expected) / spread
            rms, largest = float(error.square().mean().sqrt()), float(error.abs().max())
            # Two logits' errors differ by the root of 2 times one's; four deviations.
            best = expected.max(-1).values - expected.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
            margin = float((best / spread.squeeze(-1)).max())
            print(f"sequence {index}: rms {rms:.4f}, largest {largest:.4f}, margin {margin:.4f}, expected {drift:.4f}")
            assert rms < 2 * drift, f"sequence {index}: rms {rms:.4f}, expected {drift:.4f}"
            assert largest < 8 * drift, f"sequence {index}: largest {largest:.4f}, expected rms {drift:.4f}"
            assert margin < 4 * math.sqrt(2) * drift, (
                f"sequence {index}: the arg-max is {margin:.4f} below the oracle's"
            )


def check_nodes(model: Model, phase: Phase, step: Step, taps: Taps) -> None:
    """Every node's outputs against the oracle's for what the node read. For steps of one sequence."""
    for node in model.runs[phase].file.nodes:
        inputs, outputs = bindings(node, taps)
        if node.op == "Embedding":
            assert torch.equal(outputs["out"], inputs["table"][inputs["token_ids"].long()])
        elif node.op == "Sample":
            assert torch.equal(outputs["tokens"].long(), inputs["logits"].argmax(-1))
        elif node.op == "SinkAttention":
            check_attention(node, inputs["q"], inputs, outputs, step)
        elif node.op == "NormQkvAttention":
            expected = check_products(node, inputs, outputs, step)
            check_attention(node, expected["q"].value, inputs, outputs, step, expected["v"].allowed)
        else:
            check_products(node, inputs, outputs, step)


def check_attention(
    node: GraphNode, q: Tensor, inputs: Taps, outputs: Taps, step: Step, own_v: Tensor | None = None
) -> None:
    """Attention of these queries over what stands in the pool."""
    k, v = keys_of(node, inputs, step)
    found = oracle.attention(q, k, v, inputs["sinks"], int(node.fields["window"]), own_v)
    oracle.check(outputs["out"], found, oracle.ATTENTION_ALL, node.name)


def check_products(node: GraphNode, inputs: Taps, outputs: Taps, step: Step) -> dict[str, oracle.Bounded]:
    """A node with weights; what was expected. Of NormQkvAttention, the projection: its q is no output."""
    projects = node.op in ("NormQkvRope", "NormQkvAttention")
    expected = oracle.OPS["NormQkvRope" if projects else node.op](node.fields, inputs)
    found = dict(outputs)
    if projects:
        k, v = keys_of(node, inputs | outputs, step)
        found["k"], found["v"] = k[-len(inputs["delta"]) :], v[-len(inputs["delta"]) :]
    for name, wanted in expected.items():
        if node.op == "NormQkvAttention" and name == "q":
            continue
        value = found[name]
        if node.op == "NormMoe":
            clear = oracle.clear_choice(oracle.router_logits(node.fields, inputs), int(node.fields["top_k"]))
            assert clear.float().mean() > 0.8 or len(clear) < 100
            value, wanted = value[clear], oracle.Bounded(wanted.value[clear], wanted.allowed[clear])
            if not len(value):
                continue
        oracle.check(value, wanted, oracle.ALL, f"{node.name} {name}")
    return expected


def keys_of(node: GraphNode, tensors: Taps, step: Step) -> tuple[Tensor, Tensor]:
    """K and V [L, Hkv, D] of a step's only sequence: all of them, or (sliding decode) those that its rows may see."""
    (length,), (new,) = step.seq_lens.tolist(), (step.query_start[1] - step.query_start[0],)
    if "fresh_kv" in tensors:
        assert length == new, "a prefill from the sequence's start"
        both = tensors["fresh_kv"]
    elif node.fields["attention"] == "full":
        pages = torch.tensor(step.page_table[0, : -(-length // PAGE_TOKENS)]).long().to(DEVICE)
        both = tensors["kv_pool"][pages].permute(0, 3, 2, 1, 4).flatten(0, 1)[:length]
    else:
        ring = tensors["kv_pool"][int(step.ring_slot[0])].permute(2, 1, 0, 3)
        seen = torch.arange(max(0, length - new - FLINT.sliding_window + 1), length, device=DEVICE)
        both = ring[seen % len(ring)]
    return both[:, 0], both[:, 1]


def test_49_layers(weights: tuple[WeightFormat, Weights]) -> None:
    """A prompt longer than the window, then decode steps of 1, 1 and 8 tokens."""
    model = Model(*weights, FLINT.num_hidden_layers, [610])
    steps: list[tuple[Phase, int]] = [("prefill", 600), ("decode", 1), ("decode", 1), ("decode", 8)]
    for phase, new in steps:
        check_nodes(model, phase, *model.step(phase, {0: new}))
    model.check_logits()


def test_4_layers_in_chunks_and_batches(weights: tuple[WeightFormat, Weights]) -> None:
    """Chunks around the window and beyond the ring, two ragged sequences, decode on all paths (K2)."""
    model = Model(*weights, 4, [2300, 1100])
    steps: list[tuple[Phase, dict[int, int]]] = [
        ("prefill", {0: 513}),
        ("prefill", {0: 512, 1: 300}),
        ("prefill", {1: 1, 0: 514}),
        ("prefill", {0: 700, 1: 513}),
        ("decode", {0: 1}),
        ("decode", {1: 1}),
        ("decode", {0: 1, 1: 1}),
        ("decode", {1: 3, 0: 5}),
        ("decode", {0: 8}),
        ("decode", {0: 8, 1: 8}),
        ("prefill", {1: 1, 0: 2}),
        ("decode", {0: 1, 1: 8}),
    ]
    for phase, news in steps:
        model.step(phase, news)
    model.check_logits()


def rerun(
    model: Model, phase: Phase, groups: Sequence[dict[int, int]], starts: dict[int, int], rows: int
) -> list[dict[int, Tensor]]:
    """Logits by sequence of each group's step, the last `rows` tokens' at most. All start from the lengths `starts`."""
    results = []
    for news in groups:
        for index, start in starts.items():
            model.sequences[index].length = start
        _, taps = model.step(phase, news, rows)
        pieces = torch.split(taps["logits"], [min(rows, new) for new in news.values()])
        results.append(dict(zip(news, pieces, strict=True)))
    return results


def assert_same_bits(results: list[dict[int, Tensor]]) -> None:
    """Every step's logits are those of the last step, which holds every sequence."""
    *others, last = results
    for alone in others:
        for index, logits in alone.items():
            same = torch.equal(logits.view(torch.int32), last[index].view(torch.int32))
            assert same, f"sequence {index}, alone {len(alone)}: {int((logits != last[index]).sum())} logits differ"


@pytest.mark.parametrize(
    "groups",
    [
        [{2: 3}, {1: 3}, {1: 3, 2: 3}, {0: 1, 1: 3, 2: 3, 3: 1}],
        [{0: 8, 1: 1}, {0: 8, 2: 5}, {0: 8, 1: 1, 2: 5, 3: 2}],
        [dict.fromkeys(range(17), 1), dict.fromkeys(range(40), 1)],
    ],
    ids=["3-to-8-tokens", "9-to-16-tokens", "more-than-16-tokens"],
)
def test_decode_bits_are_the_same_alone_and_in_a_batch(
    groups: list[dict[int, int]], weights: tuple[WeightFormat, Weights]
) -> None:
    """Whole steps that share kernels. Sequences stand at lengths on both sides of the window and of a page."""
    starts = {index: [40, 600, 511, 64, 7][index % 5] for index in groups[-1]}
    model = Model(*weights, 4, [start + 8 for start in starts.values()])
    for index, start in starts.items():
        model.step("prefill", {index: start})
    assert_same_bits(rerun(model, "decode", groups, starts, rows=8))


def test_prefill_bits_are_the_same_alone_and_in_a_batch(weights: tuple[WeightFormat, Weights]) -> None:
    """Chunks of 800 and 1,600 tokens take the same cores for every product on an H200."""
    model = Model(*weights, 4, [800, 400, 400])
    groups = [{0: 800}, {1: 400, 2: 400}, {0: 800, 1: 400, 2: 400}]
    assert_same_bits(rerun(model, "prefill", groups, dict.fromkeys(range(3), 0), rows=2))


@pytest.mark.parametrize("new", [1, 8])
def test_steps_give_the_same_bits_on_repeat(new: int, weights: tuple[WeightFormat, Weights]) -> None:
    model = Model(*weights, 4, [700 + new])
    model.step("prefill", {0: 700})
    assert_same_bits(rerun(model, "decode", [{0: new}] * 3, {0: 700}, rows=8))
