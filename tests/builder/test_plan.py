"""Building plans with TensorRT-RTX, without a GPU, and the refusals of both backends."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from flint_builder import plan
from flint_plugins.library import find_library
from flint_plugins.ops import DOMAIN, OPS, VERSION, Binding, FieldValue
from flint_runtime.errors import FlintError, UnsupportedError
from tests.plugins.nodes import ONNX_TYPES, model, onnx_shape, profile, serialize

LINEAR = OPS["Linear"]
NVFP4: dict[str, FieldValue] = {"weights": "nvfp4"}


@pytest.fixture(scope="module")
def plugins() -> Path:
    pytest.importorskip("tensorrt_rtx")
    return find_library()


@pytest.fixture(scope="module")
def build(plugins: Path) -> Callable[..., bytes]:
    """Build a plan with TensorRT-RTX; by default of one Linear for sm120."""

    def call(onnx_bytes: bytes = model(LINEAR, NVFP4), **changes: Any) -> bytes:
        options: dict[str, Any] = {
            "backend": "tensorrt-rtx",
            "targets": ("sm120",),
            "library": plugins,
            "profiles": [profile(LINEAR.node_inputs(NVFP4))],
        } | changes
        return plan.build_plan(onnx_bytes, **options)

    return call


# --- Targets and backends -----------------------------------------------------------------------------------------


def test_supported_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    offered = plan.supported_targets("tensorrt-rtx")
    assert {"sm120", "sm121"} <= set(offered)
    assert not {"sm90", "sm100"} & set(offered)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert plan.supported_targets("tensorrt-rtx") == offered
    monkeypatch.setattr(plan, "present_target", lambda: "sm90")
    assert plan.supported_targets("tensorrt") == ("sm90",)


def test_backend_version() -> None:
    pytest.importorskip("tensorrt_rtx")
    assert plan.backend_version("tensorrt-rtx").startswith("1.")


def test_one_plan_for_several_targets(build: Callable[..., bytes]) -> None:
    """TensorRT-RTX lists the targets in the plan, eight bytes each; plugin nodes bring no machine code into it."""
    one, two = build(targets=("sm120",)), build(targets=("sm120", "sm121"))
    assert len(two) == len(one) + 8


def test_a_plan_does_not_depend_on_the_builds_before_it(build: Callable[..., bytes]) -> None:
    """One node: between nodes TensorRT-RTX numbers tensors anew in each build."""
    assert build() == build()


@pytest.mark.parametrize("target", ["sm90", "sm100", "sm999"])
def test_a_target_that_rtx_lacks_is_refused(target: str, build: Callable[..., bytes]) -> None:
    message = (
        rf"tensorrt-rtx cannot build a plan for {target} here; it offers .*sm120.*--backend tensorrt, .*plugin-host"
    )
    with pytest.raises(UnsupportedError, match=message) as caught:
        build(targets=("sm120", target))
    assert caught.value.exit_code == 4


def test_targets_given_twice_or_not_at_all_are_refused(build: Callable[..., bytes]) -> None:
    with pytest.raises(UnsupportedError, match="twice"):
        build(targets=("sm120", "sm120"))
    with pytest.raises(UnsupportedError, match="no target"):
        build(targets=())


def test_a_backend_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(
        UnsupportedError, match=r"module tensorrt does not load.*pip install 'flint-tensorrt\[tensorrt\]'"
    ):
        plan.import_backend("tensorrt")
    with pytest.raises(UnsupportedError, match=r"pip install 'flint-tensorrt\[rtx\]'"):
        plan.build_plan(b"", backend="tensorrt-rtx", targets=("sm120",), library=Path(), profiles=[])
    assert not plan.is_importable("tensorrt")


def test_tensorrt_builds_only_for_the_gpu_that_is_present(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build() -> bytes:
        return plan.build_plan(b"", backend="tensorrt", targets=("sm100",), library=tmp_path, profiles=[])

    monkeypatch.setattr(plan, "import_backend", lambda backend: types.SimpleNamespace())
    monkeypatch.setattr(plan, "present_target", lambda: None)
    with pytest.raises(UnsupportedError, match="this machine has no GPU or no driver"):
        build()
    monkeypatch.setattr(plan, "present_target", lambda: "sm90")
    with pytest.raises(
        UnsupportedError, match=r"tensorrt cannot build a plan for sm100 here; it offers sm90\. Build on"
    ):
        build()


# --- Graphs -------------------------------------------------------------------------------------------------------


def test_aliased_pools_chain_through_layers_and_are_outputs(build: Callable[..., bytes]) -> None:
    """kv_pool -> NormQkvRope -> kv_pool_out, which SinkAttention reads, or kv_pool -> NormQkvAttention -> kv_pool_out.

    The graph returns kv_pool_out; both kinds of layer.
    """
    inputs: dict[str, Binding] = {}
    nodes, outputs = [], []
    parts = ("NormQkvRope", "SinkAttention")
    for layer, (attention, ops) in enumerate(itertools.product(("full", "sliding"), (parts, ("NormQkvAttention",)))):
        values: dict[str, FieldValue] = {
            "attention": attention, "phase": "decode", "num_kv_heads": 2, "window": 33 if attention == "sliding" else 0,
            "weights": "nvfp4", "eps": 1e-6, "has_residual": 0, "num_heads": 4, "head_dim": 64,
        }  # fmt: skip
        produced = {name: f"{name}.{layer}" for name in ("q", "kv_pool_out", "out")}
        renamed = {"q": produced["q"], "kv_pool": f"kv_pool.{layer}"}
        for name in ops:
            op = OPS[name]
            fields = {field.name: values[field.name] for field in op.fields}
            names = [renamed.get(b.name, b.name) for b in op.node_inputs(fields)]
            inputs |= {n: b for n, b in zip(names, op.node_inputs(fields), strict=True) if n not in produced.values()}
            results = [produced[b.name] for b in op.node_outputs(fields)]
            attributes: dict[str, Any] = {**fields, "plugin_version": VERSION, "plugin_namespace": DOMAIN}
            nodes.append(helper.make_node(name, names, results, name=f"{layer}.{name}", domain=DOMAIN, **attributes))
            renamed["kv_pool"] = produced["kv_pool_out"]
        outputs += [
            helper.make_tensor_value_info(produced[n], ONNX_TYPES["bf16"], None) for n in ("kv_pool_out", "out")
        ]
    infos = [helper.make_tensor_value_info(n, ONNX_TYPES[b.dtypes[0]], onnx_shape(b)) for n, b in inputs.items()]
    messages: list[str] = []
    profiles = [profile(list(inputs.values()), greatest) for greatest in (1, 8)]
    assert build(serialize(nodes, infos, outputs), profiles=profiles, on_message=lambda _, text: messages.append(text))
    # No layer of the engine copies a pool.
    layers = next(text for text in messages if text.startswith("Engine Layer Information")).splitlines()
    assert all(any(node in line for line in layers) for node in ("0.NormQkvRope", "1.NormQkvAttention"))
    assert not [line for line in layers if "kv_pool" in line and "Copy" in line.split(",")[0]]


def test_embedding_the_library_adds_it_to_the_plan(build: Callable[..., bytes], plugins: Path) -> None:
    plain, embedded = build(), build(embed_plugins=True)
    assert len(embedded) >= len(plain) + plugins.stat().st_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "int4"}, r"Node 'node' of the graph: Linear: field weights must be one of .*found 'int4'"),
        ({"extra": 1}, r"Linear: missing fields \[\], unknown fields \['extra'\]"),
        (
            {"weights": "bf16"},
            r"Linear with these fields has the inputs x, weight; found \['x', 'weight', 'weight_scale'\]",
        ),
    ],
)
def test_a_node_that_contradicts_its_schema_is_refused(
    change: dict[str, FieldValue], message: str, build: Callable[..., bytes]
) -> None:
    proto = onnx.load_model_from_string(model(LINEAR, NVFP4))
    node = proto.graph.node[0]
    for name, value in change.items():
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])
    with pytest.raises(FlintError, match=message) as caught:
        build(proto.SerializeToString())
    assert caught.value.exit_code == 1


def test_what_is_no_graph_of_plugins_is_refused(build: Callable[..., bytes]) -> None:
    with pytest.raises(FlintError, match="not a serialised ONNX model"):
        build(b"\xff\xff\xff")
    info = helper.make_tensor_value_info("x", ONNX_TYPES["f32"], [1])
    with pytest.raises(FlintError, match="is ::Relu, which is no op of the plugin library"):
        build(serialize([helper.make_node("Relu", ["x"], ["y"], name="r")], [info], []))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, r"Profile 0 names no inputs \['x'\]"),
        ({"x": ((1, 64), (4, 64), (8, 64)), "z": ((1,), (1,), (1,))}, r"\['z'\] are no inputs of the graph"),
        ({"x": ((1,), (4,), (8,))}, r"shape of input x are .*do not fit \(-1, 64\)"),
        ({"x": ((1, 64), (4, 64), (8, 32))}, "do not fit"),
        ({"x": ((5, 64), (4, 64), (8, 64))}, "not in this order"),
    ],
)
def test_a_wrong_profile_is_refused(shapes: Any, message: str, build: Callable[..., bytes]) -> None:
    with pytest.raises(FlintError, match=message):
        build(profiles=[shapes])


# --- The library --------------------------------------------------------------------------------------------------


def test_a_copy_of_the_loaded_library_serves(build: Callable[..., bytes], plugins: Path, tmp_path: Path) -> None:
    build()
    copy = tmp_path / plugins.name
    copy.write_bytes(plugins.read_bytes())
    build(library=copy)
    copy.write_bytes(plugins.read_bytes() + b"\0")
    with pytest.raises(UnsupportedError, match="This process has already loaded the plugin library"):
        build(library=copy)


def test_a_missing_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    session = plan._Session(trt, None, "tensorrt-rtx")
    with pytest.raises(UnsupportedError, match=r"does not exist\. Install"):
        session.load_plugins(tmp_path / "libflint_plugins.so")
