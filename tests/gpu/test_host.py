"""The plugin host on a GPU: whole graphs, the arena, CUDA graphs, errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from flint_plugins.layout import pack_bf16
from flint_runtime.executors.host_library import DYNAMIC, HostError, HostGraph, Run
from tests.gpu.ops import Op, library, run_op, same_bits

pytestmark = pytest.mark.gpu

HIDDEN, WIDE, VOCABULARY, MOST_TOKENS = 256, 512, 97, 200
LAYERS = 4


class Chain:
    """Embedding, then pairs of Linear HIDDEN -> WIDE -> HIDDEN: an arena in which memory is reused many times."""

    def __init__(self, layers: int = LAYERS, most_tokens: int = MOST_TOKENS) -> None:
        self.table = torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
        self.last_tokens = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.weights = [
            _packed(WIDE if i % 2 == 0 else HIDDEN, HIDDEN if i % 2 == 0 else WIDE) for i in range(2 * layers)
        ]
        self.graph = graph = HostGraph(library())
        graph.add_input("ids", "i32", [DYNAMIC])
        graph.add_input("last", "i32", self.last_tokens.shape)
        graph.add_input("table", "bf16", self.table.shape)
        graph.add_node("Embedding", "embedding", {}, ["ids", "last", "table"], ["x0"])
        for i, weight in enumerate(self.weights):
            graph.add_input(f"w{i}", "bf16", weight.shape)
            graph.add_node("Linear", f"linear{i}", {"weights": "bf16"}, [f"x{i}", f"w{i}"], [f"x{i + 1}"])
        self.last = f"x{2 * layers}"
        graph.mark_output(self.last)
        graph.prepare({"ids": [most_tokens]}, least={"ids": [1]})
        self.arena = torch.zeros(max(graph.arena_bytes, 256), dtype=torch.uint8, device="cuda")
        self.ids = torch.zeros(most_tokens, dtype=torch.int32, device="cuda")
        self.out = torch.full((most_tokens, HIDDEN), torch.nan, device="cuda", dtype=torch.bfloat16)

    def bind(self, tokens: int) -> Run:
        addresses = {f"w{i}": weight.data_ptr() for i, weight in enumerate(self.weights)}
        addresses |= {"ids": self.ids.data_ptr(), "last": self.last_tokens.data_ptr()}
        addresses |= {"table": self.table.data_ptr(), self.last: self.out.data_ptr()}
        return self.graph.bind({"ids": [tokens]}, addresses, self.arena.data_ptr())

    def expected(self, ids: Tensor) -> Tensor:
        """The same nodes, one by one."""
        x = run_op("Embedding", {}, {"token_ids": ids, "last_tokens": self.last_tokens, "table": self.table})["out"]
        for weight in self.weights:
            x = run_op("Linear", {"weights": "bf16"}, {"x": x.contiguous(), "weight": weight})["y"].clone()
        return x

    def set_ids(self, ids: Tensor) -> None:
        self.ids[: len(ids)] = ids
        torch.cuda.synchronize()


def _packed(rows: int, columns: int) -> Tensor:
    """A random packed BF16 weight whose products keep their size."""
    matrix = (torch.randn(rows, columns) / columns**0.5).bfloat16()
    packed = pack_bf16(matrix.view(torch.int16).numpy().view(np.uint16))
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int16)).view(torch.bfloat16).cuda()


def random_ids(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (tokens,), generator=generator, dtype=torch.int32).cuda()


@pytest.fixture
def chain() -> Chain:
    return Chain()


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def launch(
    chain: Chain, run: Run, stream: torch.cuda.Stream, tokens: int, use_graph: bool = False
) -> tuple[str, Tensor]:
    """Run with a poisoned output; how it ran, and what it gave."""
    chain.out.fill_(torch.nan)
    torch.cuda.synchronize()
    kind = run.launch(stream.cuda_stream, use_graph=use_graph)
    stream.synchronize()
    assert chain.out[tokens:].isnan().all(), "rows behind the last token were written"
    return kind, chain.out[:tokens].clone()


@pytest.mark.parametrize("tokens", [1, 5, MOST_TOKENS])
def test_three_nodes(tokens: int, stream: torch.cuda.Stream) -> None:
    chain = Chain(layers=1)
    ids = random_ids(tokens)
    chain.set_ids(ids)
    _, found = launch(chain, chain.bind(tokens), stream, tokens)
    assert found.isfinite().all()
    assert same_bits(found, chain.expected(ids))


@pytest.mark.parametrize("tokens", [1, 77, MOST_TOKENS])
def test_a_reused_arena_corrupts_nothing(tokens: int, chain: Chain, stream: torch.cuda.Stream) -> None:
    """First an arena full of NaN, then every node's outputs and workspace made NaN right before it runs."""
    ids = random_ids(tokens)
    chain.set_ids(ids)
    expected = chain.expected(ids)
    activations = tokens * 2 * (HIDDEN + WIDE) * LAYERS
    assert tokens < MOST_TOKENS or chain.graph.arena_bytes - chain.graph.workspace_bytes < activations
    run = chain.bind(tokens)
    chain.arena.fill_(0xFF)
    assert same_bits(launch(chain, run, stream, tokens)[1], expected)
    chain.graph.poison(True)
    assert same_bits(launch(chain, run, stream, tokens)[1], expected)


@pytest.mark.parametrize("tokens", [1, 8, MOST_TOKENS])
def test_replay_gives_the_bits_of_a_launch(tokens: int, chain: Chain, stream: torch.cuda.Stream) -> None:
    run = chain.bind(tokens)
    for attempt, kind in enumerate(("eager", "captured", "replayed", "replayed")):
        ids = random_ids(tokens, attempt)
        chain.set_ids(ids)
        chain.arena.fill_(0xFF)
        found_kind, found = launch(chain, run, stream, tokens, use_graph=True)
        assert found_kind == kind
        assert same_bits(found, launch(chain, run, stream, tokens)[1])


def test_shapes_may_alternate(chain: Chain, stream: torch.cuda.Stream) -> None:
    runs = {tokens: chain.bind(tokens) for tokens in (1, 2, 7, 8, 9, 128)}
    for round_ in range(4):
        for tokens, run in runs.items():
            ids = random_ids(tokens, 100 * round_ + tokens)
            chain.set_ids(ids)
            found_kind, found = launch(chain, run, stream, tokens, use_graph=True)
            assert found_kind == ("eager", "captured", "replayed", "replayed")[round_]
            assert same_bits(found, launch(chain, run, stream, tokens)[1])


def test_more_shapes_than_cuda_graphs_are_kept(stream: torch.cuda.Stream) -> None:
    chain = Chain(layers=1)
    for _ in range(2):
        for tokens in range(1, 151):
            launch(chain, chain.bind(tokens), stream, tokens, use_graph=True)
    ids = random_ids(3)
    chain.set_ids(ids)
    assert same_bits(launch(chain, chain.bind(3), stream, 3, use_graph=True)[1], chain.expected(ids))


def test_a_capture_that_fails_leaves_the_stream_usable(chain: Chain, stream: torch.cuda.Stream) -> None:
    """A head dimension that no kernel has: refused by the launcher, behind all checks of shapes."""
    fields = {"attention": "full", "phase": "decode", "window": 0, "num_kv_heads": 1}
    inputs = {
        "q": torch.zeros(1, 2, 48, device="cuda", dtype=torch.bfloat16),
        "sinks": torch.zeros(2, device="cuda"),
        "positions": torch.zeros(1, device="cuda", dtype=torch.int32),
        "query_start": torch.tensor([0, 1], device="cuda", dtype=torch.int32),
        "seq_lens": torch.ones(1, device="cuda", dtype=torch.int32),
        "page_table": torch.zeros(1, 1, device="cuda", dtype=torch.int32),
        "kv_pool": torch.zeros(1, 1, 2, 64, 48, device="cuda", dtype=torch.bfloat16),
    }
    op = Op("SinkAttention", fields, inputs, use_graph=True)
    for _ in range(3):
        with pytest.raises(HostError, match="SinkAttention"):
            op.launch(stream)
        assert not torch.cuda.is_current_stream_capturing()
    ids = random_ids(5)
    chain.set_ids(ids)
    run = chain.bind(5)
    kinds = [launch(chain, run, stream, 5, use_graph=True) for _ in range(3)]
    assert [kind for kind, _ in kinds] == ["eager", "captured", "replayed"]
    assert same_bits(kinds[-1][1], chain.expected(ids))


@pytest.mark.parametrize(
    ("ids", "table", "message"),
    [
        ((torch.int32, [4]), (torch.float32, [8, 64]), "input table must be bf16, found f32"),
        ((torch.float32, [4]), (torch.bfloat16, [8, 64]), "input token_ids must be i32, found f32"),
        ((torch.int32, [4, 1]), (torch.bfloat16, [8, 64]), "input token_ids must be .T., found 2 dimensions"),
    ],
)
def test_wrong_inputs_are_refused(
    ids: tuple[torch.dtype, Sequence[int]], table: tuple[torch.dtype, Sequence[int]], message: str
) -> None:
    inputs = {
        name: torch.zeros(tuple(shape), dtype=dtype, device="cuda")
        for name, (dtype, shape) in {"token_ids": ids, "last_tokens": (torch.int32, [1]), "table": table}.items()
    }
    with pytest.raises(RuntimeError, match=message):
        run_op("Embedding", {}, inputs)


def test_run_op_through_a_cuda_graph() -> None:
    ids, table = random_ids(33), torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
    inputs = {"token_ids": ids, "last_tokens": ids[:1].clone(), "table": table}
    found = run_op("Embedding", {}, inputs, use_graph=True)["out"]
    assert same_bits(found, table[ids.long()])
