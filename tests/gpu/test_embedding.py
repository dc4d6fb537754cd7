"""Embedding on the GPU against the reference op: token ids, tokens that a slot drew last, and ids that are wrong."""

from __future__ import annotations

import pytest

from flint_runtime.executors.step import from_slot

torch = pytest.importorskip("torch")
ops = pytest.importorskip("tests.gpu.ops")

pytestmark = pytest.mark.gpu

VOCABULARY, HIDDEN = 97, 2048
LAST = [5, 96, 0, -1, VOCABULARY]
"""Tokens of the slots; of the last two, no row of the table."""


@pytest.mark.parametrize("hidden", [64, HIDDEN])
@pytest.mark.parametrize("use_graph", [False, True])
def test_tokens_and_slots(hidden: int, use_graph: bool) -> None:
    """Rows of the table bit for bit; NaN where there is no such token or slot."""
    expected = {96: 96, 3: 3, from_slot(0): 5, from_slot(1): 96, from_slot(2): 0}
    wrong = [from_slot(3), from_slot(4), from_slot(5), VOCABULARY, 2**31 - 1, -(2**31)]
    ids = torch.tensor([*expected, *wrong], dtype=torch.int32, device="cuda")
    table = torch.randn(VOCABULARY, hidden, device="cuda").bfloat16()
    last = torch.tensor(LAST, dtype=torch.int32, device="cuda")
    inputs = {"token_ids": ids, "last_tokens": last, "table": table}
    out = ops.run_op("Embedding", {}, inputs, use_graph=use_graph)["out"]
    assert torch.equal(out[: len(expected)], table[list(expected.values())])
    assert out[len(expected) :].isnan().all()
