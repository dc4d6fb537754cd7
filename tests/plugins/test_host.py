"""The plugin host without a GPU: life cycle, shape inference, memory plan, and what it refuses."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_builder.graph import export_graph
from flint_builder.weights import weight_files
from flint_plugins import library
from flint_plugins.ops import OPS, DType, FieldValue, Op
from flint_runtime.config import ModelConfig
from flint_runtime.executors.graph_file import GraphFile, parse_graph
from flint_runtime.executors.host_graph import build_graph, prepare_graph, size_ranges
from flint_runtime.executors.host_library import DYNAMIC, HostError, HostGraph, HostLibrary, Placement
from flint_runtime.manifest import PHASES, Limits, Phase, WeightFormat
from tests.plugins.nodes import DYNAMIC as DYNAMIC_SYMBOLS
from tests.plugins.nodes import SYMBOLS, combinations, label, shape
from tests.shapes import FLINT, NANO

LIMITS = Limits(max_batch=8, max_context=4096, prefill_chunk=512)
CASES = list(combinations())
NODES = pytest.mark.parametrize(("op", "fields"), CASES, ids=[label(*case) for case in CASES])
SIZES: list[dict[str, int]] = [
    {"T": 1, "B": 1, "B+1": 2, "P": 1, "R": 1, "pages": 1, "slots": 1, "sample_slots": 1},
    {"T": 5, "B": 2, "B+1": 3, "P": 9, "R": 3, "pages": 20, "slots": 4, "sample_slots": 8},
    {"T": 8, "B": 8, "B+1": 9, "P": 64, "R": 8, "pages": 512, "slots": 9, "sample_slots": 8},
]
LIFE_CYCLE = [
    "createPlugin(build)", "clone", "getCapabilityInterface", "getNbOutputs", "getOutputDataTypes", "getOutputShapes",
    "getAliasedInput", "supportsFormatCombination", "configurePlugin", "getWorkspaceSize", "getFieldsToSerialize",
    "createPlugin(runtime)", "attachToContext", "onShapeChange",
]  # fmt: skip


@pytest.fixture(scope="module")
def host() -> HostLibrary:
    path: Path = library.find_library()
    return HostLibrary(path)


@functools.cache
def graph_file(config: ModelConfig, weights: WeightFormat, phase: Phase) -> GraphFile:
    files = weight_files(config, weights, "f32", LIMITS.max_context)
    return parse_graph(export_graph(config, weights, files, LIMITS, phase).model)


def prepared(
    host: HostLibrary, config: ModelConfig, weights: WeightFormat, phase: Phase
) -> tuple[HostGraph, GraphFile]:
    file = graph_file(config, weights, phase)
    graph = build_graph(host, file)
    prepare_graph(graph, file, size_ranges(config, LIMITS, phase))
    return graph, file


def embedding(host: HostLibrary, most: int = 8) -> HostGraph:
    """One node, for up to `most` tokens."""
    graph = HostGraph(host)
    graph.add_input("ids", "i32", [DYNAMIC])
    graph.add_input("last", "i32", [3])
    graph.add_input("table", "bf16", [100, 64])
    graph.add_node("Embedding", "emb", {}, ["ids", "last", "table"], ["x"])
    graph.mark_output("x")
    graph.prepare({"ids": [most]}, least={"ids": [1]})
    return graph


def single(host: HostLibrary, op: Op, fields: Mapping[str, FieldValue], **changes: Sequence[int]) -> HostGraph:
    """A graph of one node whose symbols vary as in `nodes.DYNAMIC`; `changes` are other input shapes."""
    graph = HostGraph(host)
    bindings = op.node_inputs(fields)
    for b in bindings:
        sizes = [
            DYNAMIC if dim in DYNAMIC_SYMBOLS else size for dim, size in zip(b.shape, shape(b, SYMBOLS), strict=True)
        ]
        graph.add_input(b.name, b.dtypes[0], changes.get(b.name, sizes))
    outputs = [b.name for b in op.node_outputs(fields)]
    graph.add_node(op.name, "node", fields, [b.name for b in bindings], outputs)
    for name in outputs:
        graph.mark_output(name)
    return graph


# --- Plugins ------------------------------------------------------------------------------------------------------


@NODES
def test_every_node_lives_as_under_tensorrt(op: Op, fields: dict[str, FieldValue], host: HostLibrary) -> None:
    graph = single(host, op, fields)
    bindings = op.node_inputs(fields)
    most = {b.name: shape(b, SYMBOLS | dict.fromkeys(DYNAMIC_SYMBOLS, 8) | {"B1": 9}) for b in bindings}
    least = {b.name: shape(b, SYMBOLS | dict.fromkeys(DYNAMIC_SYMBOLS, 1) | {"B1": 2}) for b in bindings}
    graph.prepare(most, least)
    graph.set_shapes({b.name: shape(b) for b in bindings})
    symbols = op.solve(fields, [shape(b) for b in bindings], [b.dtypes[0] for b in bindings])
    for binding, wanted in zip(op.node_outputs(fields), op.output_shapes(fields, symbols), strict=True):
        assert graph.shape(binding.name) == (binding.dtypes[0], wanted)
    assert graph.life_cycle("node") == LIFE_CYCLE


@NODES
def test_aliased_outputs_share_their_inputs_memory(op: Op, fields: dict[str, FieldValue], host: HostLibrary) -> None:
    graph = single(host, op, fields)
    graph.prepare({b.name: shape(b) for b in op.node_inputs(fields)})
    for binding in op.node_outputs(fields):
        assert graph.placement(binding.name).storage == ("input" if binding.alias else "output")


def test_a_graph_can_be_prepared_again(host: HostLibrary) -> None:
    graph = embedding(host)
    graph.set_shapes({"ids": [8]})
    graph.prepare({"ids": [20]}, least={"ids": [10]})
    with pytest.raises(HostError, match="no shapes are set"):
        graph.shape("x")
    graph.set_shapes({"ids": [15]})
    assert graph.shape("x") == ("bf16", (15, 64))


# --- Whole graphs -------------------------------------------------------------------------------------------------

GRAPHS = pytest.mark.parametrize(
    ("config", "weights", "phase"),
    list(itertools.product((NANO, FLINT), ("nvfp4", "bf16"), PHASES)),
    ids=lambda value: value if isinstance(value, str) else f"{value.num_hidden_layers}layers",
)


@GRAPHS
def test_shapes_equal_the_schemas(config: ModelConfig, weights: WeightFormat, phase: Phase, host: HostLibrary) -> None:
    graph, file = prepared(host, config, weights, phase)
    for sizes in SIZES:
        given_shapes = file.dynamic_shapes(sizes)
        graph.set_shapes(given_shapes)
        known: dict[str, tuple[DType, tuple[int, ...]]] = {
            name: (given.dtype, given_shapes.get(name, given.shape))  # type: ignore[misc]
            for name, given in file.inputs.items()
        }
        for node in file.nodes:
            op = OPS[node.op]
            symbols = op.solve(node.fields, [known[x][1] for x in node.inputs], [known[x][0] for x in node.inputs])
            outputs = op.node_outputs(node.fields)
            for name, binding, wanted in zip(
                node.outputs, outputs, op.output_shapes(node.fields, symbols), strict=True
            ):
                known[name] = binding.dtypes[0], wanted
                assert graph.shape(name) == known[name], name


@GRAPHS
def test_no_two_live_tensors_share_bytes(
    config: ModelConfig, weights: WeightFormat, phase: Phase, host: HostLibrary
) -> None:
    graph, file = prepared(host, config, weights, phase)
    graph.set_shapes(
        file.dynamic_shapes({name: most for name, (_, _, most) in size_ranges(config, LIMITS, phase).items()})
    )
    blocks: dict[str, Placement] = {f"workspace of {n.name}": graph.workspace_placement(n.name) for n in file.nodes}
    first, last = {}, {}
    for index, node in enumerate(file.nodes):
        last |= dict.fromkeys((*node.inputs, *node.outputs), index)
        first |= dict.fromkeys(node.outputs, index)
    for name in first:
        placement = graph.placement(name)
        if placement.storage == "arena":
            blocks[name] = placement
            dtype, sizes = graph.shape(name)
            count = {"bf16": 2, "f32": 4, "i32": 4, "i8": 1}[dtype]
            for size in sizes:
                count *= size
            assert placement.bytes == count
            assert placement.first == first[name]
            assert placement.last == (len(file.nodes) if name in file.outputs else last[name])
        else:
            assert name in file.outputs
    check_plan([(b.offset, b.bytes, b.first, b.last) for b in blocks.values()], graph.arena_bytes)
    # Reuse: the residual stream of 49 layers must not take 49 places.
    assert graph.arena_bytes < sum(b.bytes for b in blocks.values()) / (4 if config is FLINT else 1.5)


def test_pools_stay_in_place_through_the_graph(host: HostLibrary) -> None:
    for phase in PHASES:
        graph, file = prepared(host, NANO, "nvfp4", phase)
        for name in file.outputs:
            if name.startswith("kv.") or name in ("token_counts.out", "last_tokens.out"):
                assert graph.placement(name).storage == "input"
        assert graph.placement("logits").storage == "arena"
        assert graph.placement("tokens").storage == "output"


# --- The planner --------------------------------------------------------------------------------------------------


def check_plan(blocks: list[tuple[int, int, int, int]], total: int) -> None:
    """Blocks (offset, bytes, first, last) alive together must not overlap, and all must lie in the arena."""
    events = sorted(blocks, key=lambda b: b[0])
    for i, (offset, size, first, last) in enumerate(events):
        assert offset % 256 == 0 and offset >= 0 and offset + size <= total
        for other, other_size, other_first, other_last in events[i + 1 :]:
            if other >= offset + size:
                break
            assert not other_size or last < other_first or other_last < first


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 12)).map(
            lambda b: (b[0], b[1], b[1] + b[2])
        ),
        max_size=60,
    )
)
def test_plans_of_random_blocks(host: HostLibrary, blocks: list[tuple[int, int, int]]) -> None:
    offsets, total = host.plan_memory(blocks)
    check_plan([(offset, *block) for offset, block in zip(offsets, blocks, strict=True)], total)
    aligned = [(-(-size // 256) * 256, first, last) for size, first, last in blocks]
    alive = [sum(size for size, first, last in aligned if first <= node <= last) for node in range(43)]
    assert max(alive) <= total <= sum(size for size, _, _ in aligned)


def test_the_planner_refuses_nonsense(host: HostLibrary) -> None:
    with pytest.raises(HostError, match="a block of -1 bytes"):
        host.plan_memory([(-1, 0, 1)])
    with pytest.raises(HostError, match="alive from node 3 to 2"):
        host.plan_memory([(1, 3, 2)])


# --- Errors -------------------------------------------------------------------------------------------------------


def test_plugin_messages_reach_the_caller(host: HostLibrary) -> None:
    graph = embedding(host)
    for op, fields, inputs, message in (
        (
            "Embedding",
            {},
            ["table", "last", "table"],
            r"flint::Embedding \(layer bad\): input token_ids must be i32, found bf16",
        ),
        ("Embedding", {"q": 1}, ["ids", "last", "table"], r"flint::Embedding \(layer bad\): unknown field q"),
        ("Linear", {"weights": "fp8"}, ["x", "table"], r"field weights must be nvfp4 or bf16, found 'fp8'"),
        ("Linear", {"weights": "bf16"}, ["x"], r"expected 2 inputs \(x, weight\), found 1"),
        ("Linear", {"weights": "bf16"}, ["x", "table"], r"input weight: dimension 1 \(16\*K\) must be 1024, found 64"),
        ("Convolution", {}, ["x"], r"node bad \(Convolution\): this library has no such op"),
    ):
        with pytest.raises(HostError, match=message):
            graph.add_node(op, "bad", fields, inputs, ["y"])  # type: ignore[arg-type]
    with pytest.raises(HostError, match="has 1 outputs, names were given for 2"):
        graph.add_node("Embedding", "bad", {}, ["ids", "last", "table"], ["y", "z"])
    with pytest.raises(HostError, match="no tensor nowhere"):
        graph.add_node("Embedding", "bad", {}, ["nowhere", "last", "table"], ["y"])
    with pytest.raises(HostError, match="there is a tensor 'x' already"):
        graph.add_node("Embedding", "bad", {}, ["ids", "last", "table"], ["x"])


def test_shapes_outside_the_range_are_refused(host: HostLibrary) -> None:
    graph = embedding(host)
    with pytest.raises(HostError, match="input ids: dimension 0 must be from 1 to 8, found 9"):
        graph.set_shapes({"ids": [9]})
    with pytest.raises(HostError, match="input table: a dimension must be 100, found 99"):
        graph.set_shapes({"ids": [8], "table": [99, 64]})
    with pytest.raises(HostError, match="input ids must have 1 dimensions"):
        graph.set_shapes({"ids": [2, 2]})
    graph.set_shapes({"ids": [8]})


def test_inconsistent_shapes_are_refused_and_can_be_corrected(host: HostLibrary) -> None:
    fields: dict[str, FieldValue] = {"attention": "full", "phase": "decode", "window": 0, "num_kv_heads": 2}
    op = OPS["SinkAttention"]
    graph = single(host, op, fields)
    bindings = op.node_inputs(fields)
    right = {b.name: shape(b) for b in bindings}
    graph.prepare(
        right,
        {name: [min(n, 2) if n != SYMBOLS["D"] else n for n in s] for name, s in right.items()}
        | {b.name: shape(b, SYMBOLS | {"T": 1, "B": 1, "B1": 2, "P": 1}) for b in bindings},
    )
    with pytest.raises(HostError, match=r"onShapeChange failed: flint::SinkAttention .*B1 == B \+ 1 does not hold"):
        graph.set_shapes(right | {"query_start": (2,)})
    with pytest.raises(HostError, match="no shapes are set"):
        graph.shape("out")
    graph.set_shapes(right)
    assert graph.shape("out")[1] == (SYMBOLS["T"], SYMBOLS["Hq"] * SYMBOLS["D"])


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 64])
def test_the_workspace_of_prefill_attention(host: HostLibrary, kv_heads: int) -> None:
    """Full layers: room for the partial results of every smaller step, by the rule in attention.h; at most 51.2 MB."""
    op, rows = OPS["SinkAttention"], 0
    heads = {"Hkv": kv_heads, "Hq": 8 * kv_heads, "D": 128, "W": 528}
    for most in (1, 15, 16, 17, 48, 97, 193, 769, 1537, 8192):
        symbols = SYMBOLS | heads | {"T": most, "B": 8, "B1": 9}
        needed = {}
        for attention in ("full", "sliding"):
            window = 0 if attention == "full" else 513
            fields: dict[str, FieldValue] = {
                "attention": attention, "phase": "prefill", "window": window, "num_kv_heads": kv_heads,
            }  # fmt: skip
            sizes = {b.name: shape(b, symbols) for b in op.node_inputs(fields)}
            graph = single(host, op, fields, **{name: [DYNAMIC, *size[1:]] for name, size in sizes.items()})
            graph.prepare(sizes)
            needed[attention] = graph.workspace_bytes
        for tokens in range(1, most + 1):
            splits = min(128, 768 // (kv_heads * -(-tokens // 16)))
            if splits >= 4:
                rows = max(rows, tokens * 8 * kv_heads * splits)
        assert rows * (128 * 4 + 2 * 4) <= needed["full"] <= 51.2e6
        assert needed["sliding"] == 0


@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_the_workspace_of_decode_attention_grows_with_the_step(host: HostLibrary, attention: str) -> None:
    """A profile asks only for that of its largest shapes; it holds q and, behind it, at least the normed rows."""
    op, before = OPS["NormQkvAttention"], 0
    fields: dict[str, FieldValue] = {
        "weights": "nvfp4", "eps": 1e-6, "has_residual": 1, "attention": attention,
        "window": 33 if attention == "sliding" else 0, "num_heads": 16, "num_kv_heads": 2, "head_dim": 128,
    }  # fmt: skip
    for tokens in range(1, 70):
        for sequences in {1, tokens}:
            sizes = {"Hq": 16, "Hkv": 2, "D": 128, "N": 20 * 128, "H": 128, "W": 48}
            sizes |= {"T": tokens, "B": sequences, "B1": sequences + 1}
            graph = single(host, op, fields, **{b.name: shape(b, SYMBOLS | sizes) for b in op.node_inputs(fields)})
            graph.prepare({})
            assert graph.workspace_bytes >= max(before, tokens * (16 * 128 + 128) * 2)
        before = graph.workspace_bytes


def test_reading_what_was_overwritten_is_refused(host: HostLibrary) -> None:
    graph = HostGraph(host)
    sample = OPS["Sample"]
    for b in sample.node_inputs({}):
        graph.add_input(b.name, b.dtypes[0], shape(b))
    names = [b.name for b in sample.node_inputs({})]
    outputs = [b.name for b in sample.node_outputs({})]
    graph.add_node("Sample", "first", {}, names, outputs)
    with pytest.raises(HostError, match=r"node second .* reads token_counts, which node first .* has overwritten"):
        graph.add_node("Sample", "second", {}, names, [f"{name}.2" for name in outputs])
    graph.add_node(
        "Sample", "second", {}, [f"{n}_out" if f"{n}_out" in outputs else n for n in names],
        [f"{name}.2" for name in outputs],
    )  # fmt: skip
    graph.prepare({})
    assert graph.placement("token_counts_out.2").storage == "input"


def test_addresses_are_checked_before_anything_runs(host: HostLibrary) -> None:
    graph = embedding(host)
    shapes = {"ids": [5]}
    for addresses, message in (
        ({"last": 256, "table": 256, "x": 256}, "input ids has no address"),
        ({"ids": 256, "last": 256, "table": 256}, "output x has no address"),
    ):
        with pytest.raises(HostError, match=message):
            graph.bind(shapes, addresses, 0).launch(0)
    everything = {"ids": 256, "last": 256, "table": 256, "x": 256}
    with pytest.raises(HostError, match="a CUDA graph needs a stream other than the default one"):
        graph.bind(shapes, everything, 0).launch(0, use_graph=True)

    op = OPS["Sample"]
    graph = single(host, op, {})
    shapes = {b.name: shape(b) for b in op.node_inputs({})}
    graph.prepare(shapes)
    wrong = dict.fromkeys([*shapes, *(b.name for b in op.outputs)], 256) | {"token_counts_out": 512}
    with pytest.raises(HostError, match="output token_counts_out must have the address of token_counts"):
        graph.bind(shapes, wrong, 0).launch(0)


def test_an_unprepared_graph_does_not_run(host: HostLibrary) -> None:
    graph = HostGraph(host)
    with pytest.raises(HostError, match="the graph has no nodes"):
        graph.prepare({})
    graph.add_input("ids", "i32", [DYNAMIC])
    for call in (lambda: graph.arena_bytes, lambda: graph.set_shapes({"ids": [1]})):
        with pytest.raises(HostError, match="not prepared"):
            call()
    with pytest.raises(HostError, match="not prepared"):
        graph.bind({"ids": [1]}, {"ids": 256}, 0).launch(0)


def test_null_and_nonsense_do_not_crash(host: HostLibrary) -> None:
    c = host.c
    assert c.flintHostAddInput(None, b"x", 3, 0, None) == -1
    assert b"graph is a null pointer" in c.flintHostLastError()
    assert c.flintHostRun(None, None, 0, None, 0, 0, None, 0) == -1
    c.flintHostDestroy(None)
    graph = HostGraph(host)
    assert c.flintHostAddInput(graph._handle, None, 3, 0, None) == -1
    assert c.flintHostAddInput(graph._handle, b"x", 3, 3, None) == -1
    assert c.flintHostAddInput(graph._handle, b"x", 99, 0, None) == -1
    assert b"DataType 99" in c.flintHostLastError()
    assert c.flintHostMarkOutput(graph._handle, 7, 0) == -1
    assert c.flintHostLifeCycle(graph._handle, 0) is None
    with pytest.raises(HostError, match="dimension 0 is -7"):
        graph.add_input("y", "i32", [-7])
    with pytest.raises(HostError, match=r"cannot be used as plugin host"):
        HostLibrary(Path("nowhere.so"))
