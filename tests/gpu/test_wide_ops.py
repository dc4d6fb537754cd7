"""Every op with weights at the released model's widths, from 1 to 8,192 tokens, against the torch oracle.

The weights of an op are made once and serve all numbers of tokens. Every run is repeated, the second time from a CUDA
graph, and must give the same bits. LmHead takes up to 64 rows from 8,192 tokens; the full vocabulary is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flint_plugins.ops import FieldValue
from tests.gpu import torch_oracle as oracle
from tests.gpu.inputs import FORMATS, TOP_K, node_inputs, node_weights
from tests.gpu.ops import run_op, same_bits

WIDE = {"hidden": 2048, "heads": 32, "kv_heads": 4, "dense": 6144, "moe": 512, "shared": 1024, "experts": 256}
PANELS = 150_144 // 16
TOKENS = (1, 2, 3, 7, 8, 9, 33, 64, 200, 513, 2048, 8192)
ROWS = (1, 2, 3, 7, 8, 9, 33, 64)
DEVICE = "cuda"
PER_TOKEN = ("x", "delta", "residual", "positions")


@dataclass(frozen=True)
class Node:
    """An op with weights on the GPU."""

    op: str
    fmt: str
    weights: dict[str, Tensor]

    def inputs(self, tokens: int) -> tuple[dict[str, FieldValue], dict[str, Tensor]]:
        """Fields and inputs for so many tokens."""
        torch.manual_seed(tokens)
        return node_inputs(
            self.op, self.fmt, WIDE, tokens, rows=min(tokens, ROWS[-1]), device=DEVICE, weights=self.weights
        )

    def run(self, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs, K and V apart; the same bits launched and from a CUDA graph."""
        first, again = (
            {name: tensor.clone() for name, tensor in run_op(self.op, fields, inputs, use_graph=graph).items()}
            for graph in (False, True)
        )
        for name, tensor in first.items():
            assert same_bits(tensor, again[name]), f"{name}: not the same bits on repeat"
        if "fresh_kv" in first:
            first["k"], first["v"] = first.pop("fresh_kv").unbind(1)
        return first

    def check(self, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> None:
        """Run and compare with the oracle; of NormMoe, tokens without a near-tie count."""
        found, expected = self.run(fields, inputs), oracle.OPS[self.op](fields, inputs)
        assert found.keys() == expected.keys()
        rows = torch.ones(len(next(iter(found.values()))), dtype=torch.bool, device=DEVICE)
        if self.op == "NormMoe":
            rows = oracle.clear_choice(oracle.router_logits(fields, inputs), TOP_K)
            assert rows.float().mean() > 0.9
        for name, wanted in expected.items():
            wanted = oracle.Bounded(wanted.value[rows], wanted.allowed[rows])
            oracle.check(found[name][rows], wanted, oracle.ALL, f"{self.op} {name}")


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    op, fmt = request.param
    torch.manual_seed(0)
    made = Node(op, fmt, node_weights(op, fmt, WIDE, PANELS, DEVICE))
    yield made
    made.weights.clear()
    torch.cuda.empty_cache()


def nodes(*ops: str) -> pytest.MarkDecorator:
    """Run a test with these ops in both formats; their weights are made once for all tests."""
    cases = [(op, fmt) for op in ops for fmt in FORMATS]
    return pytest.mark.parametrize("node", cases, indirect=True, scope="module", ids="-".join)


@nodes(*oracle.OPS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_op(tokens: int, node: Node) -> None:
    if node.op == "NormMoe" and tokens < 100:
        # So few tokens may all have near-ties: take them from many.
        fields, inputs = node.inputs(300)
        clear = oracle.clear_choice(oracle.router_logits(fields, inputs), TOP_K)
        inputs |= {name: inputs[name][clear][:tokens].contiguous() for name in ("delta", "residual")}
    else:
        fields, inputs = node.inputs(tokens)
    node.check(fields, inputs)


@nodes("NormMoe")
def test_bf16_router(node: Node) -> None:
    """A checkpoint may store the router in BF16."""
    for tokens in (1, 8, 9, 64, 300):
        fields, inputs = node.inputs(300)
        inputs["router"] = inputs["router"].bfloat16()
        clear = oracle.clear_choice(oracle.router_logits(fields, inputs), TOP_K)
        inputs |= {name: inputs[name][clear][:tokens].contiguous() for name in ("delta", "residual")}
        node.check(fields, inputs)


@nodes("NormMoe")
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("tokens", [2, 8, 9, 42, 63, 64, 65, 600])
def test_chosen_experts(tokens: int, spread: bool, node: Node) -> None:
    """All tokens choose the same six experts, or (up to 42 tokens) none chooses another's."""
    fields, inputs = node.inputs(tokens)
    pairs = torch.arange(TOP_K * tokens, device=DEVICE) % (252 if spread else TOP_K)
    target = pairs.view(tokens, TOP_K)
    strength = 30 * torch.linspace(1.5, 1.0, TOP_K, device=DEVICE)[:, None]
    inputs["delta"] = (inputs["delta"].float() + (strength * inputs["router"][target]).sum(1)).bfloat16()
    inputs["residual"] = torch.zeros_like(inputs["residual"])
    chosen = oracle.router_logits(fields, inputs).topk(TOP_K).indices
    assert torch.equal(chosen.sort().values, target.sort().values)
    node.check(fields, inputs)


@nodes("Linear", "NormMlp", "NormMoe", "NormQkvRope")
@pytest.mark.parametrize(("alone", "together"), [(3, 8), (9, 64), (100, 200), (300, 500), (4096, 8192)])
def test_bits_are_the_same_alone_and_in_a_batch(alone: int, together: int, node: Node) -> None:
    """Numbers of tokens that share kernels on an H200, see README."""
    check_same_bits(alone, together, node)


@nodes("Linear", "NormMlp", "NormMoe", "NormQkvRope")
def test_bits_of_two_tokens_are_the_same_in_a_batch(node: Node) -> None:
    """NormMoe's kernels take two tokens as they take one, the others' as they take eight."""
    check_same_bits(*((1, 2) if node.op == "NormMoe" else (2, 8)), node)


@nodes("NormMoe")
@pytest.mark.parametrize(("alone", "together"), [(9, 800), (200, 800), (800, 1600)])
def test_bits_of_experts_are_the_same_alone_and_in_a_batch(alone: int, together: int, node: Node) -> None:
    """The routed experts' kernels change, and their bits do not; the shared expert's do, so it is silent."""
    node = Node(node.op, node.fmt, {**node.weights, "shared_down": torch.zeros_like(node.weights["shared_down"])})
    check_same_bits(alone, together, node)


def check_same_bits(alone: int, together: int, node: Node) -> None:
    """The first and the last `alone` rows of a batch, run by themselves."""
    fields, inputs = node.inputs(together)
    found = node.run(fields, inputs)
    for rows in (slice(0, alone), slice(together - alone, together)):
        part = {name: t[rows].contiguous() if name in PER_TOKEN else t for name, t in inputs.items()}
        for name, value in node.run(fields, part).items():
            assert same_bits(value, found[name][rows]), f"{node.op} {name}, rows {rows}"


@nodes("LmHead")
@pytest.mark.parametrize(("alone", "together"), [(2, 8), (9, 32)])
def test_lm_head_bits_are_the_same_alone_and_in_a_batch(alone: int, together: int, node: Node) -> None:
    fields, inputs = node.inputs(together)
    found = node.run(fields, inputs)["logits"]
    part = {**inputs, "logits_rows": inputs["logits_rows"][:alone].contiguous()}
    assert same_bits(node.run(fields, part)["logits"], found[:alone])


@nodes(*oracle.OPS)
def test_rows_do_not_mix(node: Node) -> None:
    """A token of NaN spoils its own row only."""
    for tokens in (8, 33, 513):
        fields, inputs = node.inputs(tokens)
        if node.op == "LmHead":
            inputs["logits_rows"] = torch.arange(min(tokens, 33), dtype=torch.int32, device=DEVICE)
        clean = node.run(fields, inputs)
        first = "x" if node.op == "Linear" else "delta"
        spoilt = {**inputs, first: inputs[first].clone()}
        spoilt[first][5] = torch.nan
        for name, value in node.run(fields, spoilt).items():
            assert value[5].isnan().all(), name
            rest = torch.arange(len(value), device=DEVICE) != 5
            assert same_bits(value[rest], clean[name][rest]), name
