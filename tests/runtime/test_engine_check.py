"""What is compared at opening: graphs, weight files and RoPE table with the manifest. Nothing may get past it that an
executor then trips over; tests.fuzz holds that against mutants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save

from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError
from flint_runtime.executors.engine_check import check_contents
from flint_runtime.inspection import content_problems
from flint_runtime.manifest import Phase
from flint_runtime.rope import is_rope_row, rope_rows
from tests.runtime.conftest import LIMITS
from tests.runtime.engines import rewrite_file, rewrite_manifest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine(directory: Path, tmp_path: Path) -> Path:
    """An engine that a test may spoil."""
    return shutil.copytree(directory, tmp_path / "engine")


def problem(engine: Path) -> str:
    """Why an engine does not open."""
    with pytest.raises(EngineError) as error:
        check_contents(Engine.open(engine))
    assert len(str(error.value)) < 1000 + len(str(engine))
    return str(error.value)


def edit_graph(engine: Path, phase: Phase, change: Callable[[onnx.GraphProto], object]) -> None:
    model = onnx.load(engine / f"graph/{phase}.onnx")
    change(model.graph)
    rewrite_file(engine, f"graph/{phase}.onnx", model.SerializeToString())


# --- engine.json against the rest -------------------------------------------------------------------------------------


def test_a_whole_engine_opens(directory: Path, bf16_directory: Path) -> None:
    for whole in (directory, bf16_directory):
        check_contents(Engine.open(whole))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "theta": ({"rope_theta": 10001.0}, "row .* of the RoPE table is not that of rope_theta 10001.0"),
    "window": ({"sliding_window": 34}, "window is 33, the model's is 34"),
    "longer window": ({"sliding_window": 64}, r"input kv\.1 must be bf16 \[slots, 1, 2, 144, 128\]"),
    "top-k": ({"num_experts_per_tok": 5}, "top_k is 6, the model's is 5"),
    "epsilon": ({"rms_norm_eps": 2e-6}, "eps is .*, the model's is 1.99"),
    "vocabulary": ({"vocab_size": 736}, r"input .* must be .*736\]"),
    "hidden size": ({"hidden_size": 256}, "H is 128, the model's is 256"),
    "heads": ({"num_attention_heads": 4}, "num_heads is 8, the model's is 4"),
    "KV heads": ({"num_key_value_heads": 2}, r"input kv\.0 must be"),
    "head size": ({"head_dim": 64}, r"input kv\.0 must be"),
    "dense MLP": ({"intermediate_size": 64}, "I is 128, the model's is 64"),
    "experts": ({"num_experts": 16}, "E is 8, the model's is 16"),
    "expert size": ({"moe_intermediate_size": 128}, "I is 64, the model's is 128"),
    "shared expert": ({"shared_expert_intermediate_size": 128}, "S is 64, the model's is 128"),
    "which layers are dense": ({"mlp_only_layers": [1]}, "is of the other kind"),
    "layers": (
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        "no step array, state, result or tensor of a weight file",
    ),
    "kinds of layers": (
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, r"input kv\.1 must be"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_forged_model_does_not_fit_the_files(name: str, engine: Path) -> None:
    """Even with the right digest."""
    change, message = CHANGES[name]
    config = json.loads((engine / "engine.json").read_text())["model"]
    assert all(config[key] != value for key, value in change.items())
    rewrite_manifest(engine, model=config | change)
    with pytest.raises(EngineError, match=message):
        check_contents(Engine.open(engine))


def test_verify_says_what_a_forged_manifest_does_not_fit(engine: Path) -> None:
    rewrite_manifest(engine, limits=LIMITS.model_dump() | {"max_context": 100})
    rope, library = content_problems(Engine.open(engine))
    assert rope.endswith("the number of rows of the RoPE table is 200, limits.max_context is 100")
    assert "has no libflint_plugins.so" in library


def test_a_context_beyond_the_rope_table_is_refused(engine: Path) -> None:
    rewrite_manifest(engine, limits=LIMITS.model_dump() | {"max_context": 201})
    assert "the number of rows of the RoPE table is 200, limits.max_context is 201" in problem(engine)


def test_other_weights_are_refused(engine: Path) -> None:
    rewrite_manifest(engine, weights="bf16")
    assert "weights is 'nvfp4', the model's is 'bf16'" in problem(engine)


def test_states_that_nothing_can_address_are_refused(engine: Path) -> None:
    config = json.loads((engine / "engine.json").read_text())["model"]
    # Each within its bounds; together more than 32 bits count.
    rewrite_manifest(engine, model=config | {"sliding_window": 1 << 20, "head_dim": 1 << 10, "num_key_value_heads": 8})
    assert "has more than 2147483647 elements" in problem(engine)


def test_a_removed_weight_file_is_named_by_its_tensors(engine: Path) -> None:
    files = json.loads((engine / "engine.json").read_text())["files"]
    rewrite_manifest(engine, files=[entry for entry in files if entry["path"] != "weights/head.safetensors"])
    assert "the input head.norm, head.scale, head.weight is no step array" in problem(engine)


# --- Weight files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rope", torch.zeros(200, 128), "row 0 of the RoPE table"),
        ("rope", torch.full((200, 128), torch.nan), "row 0 of the RoPE table"),
        ("rope", torch.zeros(100, 128), "input rope must be f32 [100, 128], found f32 [200, 128]"),
        ("embedding", torch.zeros(768, 128), "input embedding must be f32 [768, 128], found bf16 [768, 128]"),
        ("surplus", torch.zeros(3), "it has no input surplus"),
        ("positions", torch.zeros(3, dtype=torch.int32), "input positions must be i32 [3], found i32 [T]"),
        ("kv.0", torch.zeros(3), "input kv.0 must be f32 [3], found bf16 [pages"),
        ("head.norm", torch.zeros(128), "tensor 'head.norm' is in another weight file, too"),
    ],
)
def test_other_tensors_are_refused(name: str, tensor: torch.Tensor, message: str, engine: Path) -> None:
    path = "weights/embedding.safetensors"
    rewrite_file(engine, path, save(load_file(engine / path) | {name: tensor}))
    assert message in problem(engine)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("position", [0, 1, 1000, 262143])
def test_a_rope_row_may_differ_by_rounding_only(position: int, theta: float) -> None:
    row = rope_rows(position, position + 1, 128, theta)[0]
    assert is_rope_row(row, position, theta)
    if position:
        assert not is_rope_row(row, position, theta * 1.001)
        assert not is_rope_row(row, position + 1, theta)
    row[-1] += 1e-3
    assert not is_rope_row(row, position, theta)
    row[-1] = np.nan
    assert not is_rope_row(row, position, theta)


# --- Graphs -----------------------------------------------------------------------------------------------------------


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a tensor wherever it stands."""
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for value in (*graph.input, *graph.output):
        value.name = new if value.name == old else value.name


def node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    (found,) = (node for node in graph.node if node.name == name)
    return found


GRAPHS: dict[str, tuple[Callable[[onnx.GraphProto], object], str]] = {
    "no nodes": (lambda g: g.node.__delitem__(slice(None)), "0 layers and 0 MLPs, the model has 3 layers"),
    "another op": (lambda g: setattr(g.node[0], "op_type", "Gather"), "'flint'.'Gather', which is no plugin of ours"),
    "another domain": (lambda g: setattr(g.node[0], "domain", ""), "''.'Embedding', which is no plugin of ours"),
    "a name with a NUL": (lambda g: setattr(g.node[0], "name", "a\0b"), "'a\\x00b' is no name"),
    "a tensor twice": (lambda g: g.input.add().CopyFrom(g.input[0]), "tensor token_ids comes twice"),
    "an input lost": (lambda g: g.input.remove(g.input[0]), "it has no input token_ids"),
    "an output lost": (lambda g: g.output.remove(g.output[1]), "it has no output tokens"),
    "a fixed size": (
        lambda g: setattr(g.input[0].type.tensor_type.shape.dim[0], "dim_value", 3), "must be i32 [T], found i32 [3]"
    ),
    "another type": (lambda g: setattr(g.input[0].type.tensor_type, "elem_type", 1), "must be i32 [T], found f32 [T]"),
    "an unknown type": (lambda g: setattr(g.input[0].type.tensor_type, "elem_type", 17), "has ONNX type 17"),
    "an initializer": (lambda g: g.initializer.add(name="embedding"), "it has initializer"),
    "a node twice": (
        lambda g: g.node.add().CopyFrom(node(g, "layers.1.attn.out")), "output y is layers.1.attn.out.y, which exists"
    ),
    "a state that was updated before": (
        lambda g: g.node.add().CopyFrom(g.node[0]), "last_tokens, which a node before it has updated to last_tokens.out"
    ),
    "a layer's end lost": (lambda g: g.node.remove(node(g, "layers.1.mlp")), "reads layers.1.mlp.out, which no input"),
    "the wrong order": (lambda g: g.node.insert(0, g.node.pop()), "node sample: it reads logits, which no input"),
    "an input lost of a node": (lambda g: node(g, "head").input.pop(), "node head: LmHead: expected 6 inputs"),
    "an output lost of a node": (lambda g: node(g, "sample").output.pop(), "node sample: expected 6 outputs, found 5"),
    "an input of another shape": (
        lambda g: node(g, "head").input.__setitem__(2, "layers.0.attn.q_norm"), "nobody reads head.norm"
    ),
    "another layer's cache": (
        lambda g: [rename(g, a, b) for a, b in (("kv.1", "x"), ("kv.2", "kv.1"), ("x", "kv.2"))],
        "kv_pool must be kv.1, found kv.2",
    ),
    "another state": (
        lambda g: node(g, "sample").input.__setitem__(13, "last_tokens"), "input token_counts must be ('Q', 'V')"
    ),
    "no plugin version": (lambda g: g.node[0].attribute.pop(0), "plugin_version must be '1', found None"),
    "a field of another type": (
        lambda g: [a.ClearField("type") for a in node(g, "head").attribute if a.name == "eps"],
        "node head: field 'eps' has ONNX attribute type 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_does_not_fit_is_refused(name: str, engine: Path) -> None:
    change, message = GRAPHS[name]
    edit_graph(engine, "decode", change)
    assert message in problem(engine)


def test_a_graph_file_that_is_no_graph_is_refused(engine: Path) -> None:
    for data in (b"", b"\0", b"\xff" * 100, bytes(1000)):
        rewrite_file(engine, "graph/prefill.onnx", data)
        assert "prefill.onnx" in problem(engine)
