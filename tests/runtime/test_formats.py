"""Engines of format 1, built before NormQkvAttention: their decode graphs and libraries have its parts only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import onnx
import pytest
import torch

from flint_plugins import library
from flint_plugins.ops import DOMAIN, OPS, VERSION, FieldValue
from flint_runtime.engine import Engine
from flint_runtime.executors.graph_file import load_graph, parse_graph
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.inspection import library_problem
from tests.runtime.engines import Place, feed, open_poisoned, rewrite_manifest
from tests.runtime.fake_cuda import FakeCuda

NEW_OP, PARTS = "NormQkvAttention", ("NormQkvRope", "SinkAttention")
GRAPH = "graph/decode.onnx"

pytestmark = pytest.mark.usefixtures("one_thread")


def split_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with the two parts in the place of each NormQkvAttention."""
    nodes = []
    for node in model.graph.node:
        if node.op_type != NEW_OP:
            nodes.append(node)
            continue
        (plain,) = parse_graph(onnx.helper.make_model(onnx.helper.make_graph([node], "one", [], []))).nodes
        bindings = (*OPS[NEW_OP].node_inputs(plain.fields), *OPS[NEW_OP].node_outputs(plain.fields))
        names = {b.name: name for b, name in zip(bindings, (*plain.inputs, *plain.outputs), strict=True)}
        names["q"] = f"{node.name}.q"
        values: dict[str, FieldValue] = {**plain.fields, "phase": "decode"}
        for part in PARTS:
            op = OPS[part]
            fields = {field.name: values[field.name] for field in op.fields}
            inputs = [names[b.name] for b in op.node_inputs(fields)]
            outputs = [names[b.name] for b in op.node_outputs(fields)]
            attributes = {"plugin_version": VERSION, "plugin_namespace": DOMAIN, **fields}
            nodes.append(
                onnx.helper.make_node(part, inputs, outputs, f"{node.name}.{part}", domain=DOMAIN, **attributes)
            )
            names["kv_pool"] = names["kv_pool_out"]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.fixture(scope="module")
def older(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine as format 1 had it."""
    engine = tmp_path_factory.mktemp("format-1") / "engine"
    shutil.copytree(directory, engine)
    data = split_attention(onnx.load(engine / GRAPH)).SerializeToString()
    (engine / GRAPH).write_bytes(data)
    files = json.loads((engine / "engine.json").read_text())["files"]
    for entry in files:
        if entry["path"] == GRAPH:
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(engine, format_version=1, files=files)
    return engine


@pytest.fixture
def older_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries have no op that format 1 did not know."""
    whole = library.library_info

    def info(path: Path) -> library.LibraryInfo:
        found = whole(path)
        return dataclasses.replace(found, ops={name: v for name, v in found.ops.items() if name != NEW_OP})

    monkeypatch.setattr(library, "library_info", info)


def test_the_graphs_differ_in_attention_only(directory: Path, older: Path) -> None:
    found, wanted = (load_graph(engine / GRAPH) for engine in (older, directory))
    ops = [node.op for node in found.nodes]
    assert NEW_OP not in ops and ops.count("SinkAttention") == [n.op for n in wanted.nodes].count(NEW_OP) == 3
    assert (found.inputs, found.outputs, found.aliases()) == (wanted.inputs, wanted.outputs, wanted.aliases())


def test_the_reference_executor_gives_the_same_logits(directory: Path, older: Path) -> None:
    prompt = torch.randint(0, 768, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for engine in (older, directory):
        executor = open_poisoned(engine)
        place = Place(executor)
        feed(executor, place, prompt[:40], 40)
        found.append(feed(executor, place, prompt[40:], 2, "decode"))
    assert (found[0] == found[1]).all()


@pytest.mark.usefixtures("older_library")
def test_gpu_executors_need_the_ops_of_the_graphs_only(older: Path, fake: FakeCuda, plugins: Path) -> None:
    engine = Engine.open(older)
    PluginHostExecutor.check_here(engine, plugins)
    executor = PluginHostExecutor(engine, plugins)
    assert executor.graphs["decode"].arena_bytes > 0
    executor.close()
    with pytest.raises(library.LibraryError, match=rf"lacks version {VERSION} of the ops {NEW_OP}"):
        library.check_library(plugins)  # as the builder does


@pytest.mark.usefixtures("older_library")
def test_verify_takes_the_engines_own_library(older: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "library_path", plugins)
    assert library_problem(Engine.open(older)) is None
