"""The compiled plugin library: what it is, what it needs, and what TensorRT-RTX makes of its plugins without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from flint_plugins import layout, library
from flint_plugins.library import LibraryError
from flint_plugins.ops import DOMAIN, OPS, VERSION, FieldValue, Op
from flint_runtime.errors import FlintError
from tests.plugins.nodes import combinations, label, model, profile

CASES = list(combinations())
NODES = pytest.mark.parametrize(("op", "fields"), CASES, ids=[label(*case) for case in CASES])
NVFP4_MOE: dict[str, FieldValue] = {"weights": "nvfp4", "eps": 1e-6, "top_k": 2}
FULL_DECODE: dict[str, FieldValue] = {"attention": "full", "phase": "decode", "window": 0, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def plugins() -> Path:
    return library.find_library()


@pytest.fixture(scope="module")
def build(plugins: Path) -> Callable[..., bytes]:
    """Build a plan of one ONNX model for sm120."""
    pytest.importorskip("tensorrt_rtx")
    from flint_builder.plan import build_plan

    def call(onnx_bytes: bytes, *profiles: Any) -> bytes:
        return build_plan(
            onnx_bytes, backend="tensorrt-rtx", targets=("sm120",), library=plugins, profiles=list(profiles)
        )

    return call


# --- The file -----------------------------------------------------------------------------------------------------


def test_info(plugins: Path) -> None:
    info = library.check_library(plugins)
    assert info.version == library.package_version()
    assert info.layout_version == layout.LAYOUT_VERSION
    assert info.ops == dict.fromkeys(OPS, VERSION)
    assert info.architectures and all(re.fullmatch(r"sm\d+", name) for name in info.architectures)
    assert re.fullmatch(r"\d+\.\d+\.\d+", info.header_version)


def dynamic_section(path: Path) -> list[tuple[str, str]]:
    if not shutil.which("readelf"):
        pytest.skip("readelf is missing")
    text = subprocess.run(["readelf", "-dW", path], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\((NEEDED|SONAME|RPATH|RUNPATH)\).*\[(.*)\]", text)


def test_library_needs_only_the_c_library(plugins: Path) -> None:
    """Engines carry it to machines with another TensorRT, CUDA toolkit or C++ library."""
    needed = [name for tag, name in dynamic_section(plugins) if tag != "SONAME"]
    assert all(re.match(r"(libc|libm|libdl|librt|libpthread|ld-linux-x86-64)\.so", name) for name in needed), needed
    symbols = subprocess.run(["nm", "-D", plugins], check=True, capture_output=True, text=True).stdout.splitlines()
    defined = {line.split()[-1] for line in symbols if len(line.split()) == 3}
    assert {"getCreators", "setLoggerFinder", "flintPluginsInfo"} <= defined
    assert all(name.startswith("flint") for name in defined - {"getCreators", "setLoggerFinder"}), defined
    undefined = [line for line in symbols if re.match(r"\s+U ", line) and "@GLIBC_" not in line]
    assert not undefined


def test_stub_leads_to_tensorrt_rtx(plugins: Path) -> None:
    assert dynamic_section(library.find_stub()) == [
        ("NEEDED", "libtensorrt_rtx.so.1"),
        ("SONAME", "libtensorrt_rtx.so"),
    ]


# --- Case E5: a library that does not fit -------------------------------------------------------------------------


def test_another_version_is_refused(plugins: Path) -> None:
    found = library.package_version()
    with pytest.raises(LibraryError, match=rf"{plugins} is version {found}, but version 9\.8\.7 is wanted\. Install"):
        library.check_library(plugins, version="9.8.7")


def test_another_layout_is_refused(plugins: Path) -> None:
    with pytest.raises(LibraryError, match=f"weights of layout {layout.LAYOUT_VERSION}, but layout 99 is"):
        library.check_library(plugins, layout_version=99)


def test_what_is_no_plugin_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / library.LIBRARY_NAME
    with pytest.raises(LibraryError, match=f"{path} does not exist"):
        library.library_info(path)
    path.write_text("not an ELF file")
    with pytest.raises(LibraryError, match=f"{path} cannot be loaded: "):
        library.library_info(path)
    import _ctypes

    with pytest.raises(LibraryError, match="is not a Flint plugin library: it exports no flintPluginsInfo"):
        library.library_info(Path(_ctypes.__file__))


def test_environment_variable_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.so"
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(path))
    with pytest.raises(LibraryError, match=f"{path}, which the environment variable FLINT_PLUGINS_LIBRARY names"):
        library.find_library()
    path.touch()
    assert library.find_library() == path


def test_a_host_of_another_processor_takes_its_own_library(plugins: Path, tmp_path: Path) -> None:
    own = tmp_path / library.LIBRARY_NAME
    assert library.library_for_host(own) == own, "a missing one is missed when it is loaded"
    header = bytearray(plugins.read_bytes()[:64])
    own.write_bytes(header)
    assert library.library_for_host(own) == own
    header[18:20] = (183 if header[18] == 62 else 62).to_bytes(2, "little")
    own.write_bytes(header)
    assert library.library_for_host(own) == plugins
    own.write_bytes(b"no library")
    assert library.library_for_host(own) == own


# --- Plugins in TensorRT-RTX --------------------------------------------------------------------------------------


@NODES
def test_every_node_builds(op: Op, fields: dict[str, FieldValue], build: Callable[..., bytes]) -> None:
    assert build(model(op, fields), profile(op.node_inputs(fields)))


@NODES
def test_a_wrong_type_is_refused_by_name(op: Op, fields: dict[str, FieldValue], build: Callable[..., bytes]) -> None:
    """For the last input, so that the plugin has looked at all of them."""
    binding = op.node_inputs(fields)[-1]
    wrong = next(d for d in ("f32", "i32") if d not in binding.dtypes)
    message = (
        rf"flint::{op.name} \(layer node\): input {binding.name} must be {' or '.join(binding.dtypes)}, found {wrong}"
    )
    with pytest.raises(FlintError, match=message):
        build(model(op, fields, dtypes={binding.name: wrong}), profile(op.node_inputs(fields)))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("norm", [1, 128], r"input norm must be \[H\], found 2 dimensions"),
        ("norm", [64], r"input norm: dimension 0 \(H\) must be 128, found 64"),
        ("experts_down", [4, 8, 9 * 64], r"input experts_down: dimension 2 \(9\*I\) must be 1728, found 576"),
        ("shared_gate_up_scale", [1], r"input shared_gate_up_scale: dimension 0 \(2\) must be 2, found 1"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(
    name: str, shape: list[int | str], message: str, build: Callable[..., bytes]
) -> None:
    op = OPS["NormMoe"]
    with pytest.raises(FlintError, match=rf"flint::NormMoe \(layer node\): {message}"):
        build(model(op, NVFP4_MOE, shapes={name: shape}), profile(op.node_inputs(NVFP4_MOE)))


def test_a_profile_that_breaks_an_equation_is_refused(build: Callable[..., bytes]) -> None:
    op = OPS["SinkAttention"]
    wrong = profile(op.node_inputs(FULL_DECODE), query_start=((2,), (5,), (8,)))
    with pytest.raises(FlintError, match=r"SinkAttention \(layer node\): B1 == B \+ 1 does not hold for B=8, B1=8"):
        build(model(op, FULL_DECODE), wrong)


def test_a_missing_input_is_refused_by_the_plugin(build: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    from flint_builder import plan

    monkeypatch.setattr(plan, "_check_nodes", lambda onnx_bytes: None)
    proto = onnx.load_model_from_string(model(OPS["SinkAttention"], FULL_DECODE))
    del proto.graph.node[0].input[-1]
    with pytest.raises(FlintError, match=r"expected 7 inputs \(q, sinks, .*kv_pool\), found 6"):
        build(proto.SerializeToString())


class Creator:
    """Calls a plugin creator as a host does, and keeps what it logs."""

    def __init__(self, session: Any, op: str) -> None:
        self.session, self.trt = session, session.trt
        self.creator = self.trt.get_plugin_registry().get_creator(op, VERSION, DOMAIN)
        self.builder = self.trt.Builder(session.logger)  # Plugins find the logger while a builder lives.

    def create(self, fields: dict[str, FieldValue]) -> tuple[Any, list[str]]:
        """The plugin or None, and the errors logged."""
        types = self.trt.PluginFieldType
        plugin_fields = []
        for name, value in fields.items():
            if isinstance(value, str):
                plugin_fields.append(self.trt.PluginField(name, value.encode(), types.CHAR))
            elif isinstance(value, int):
                plugin_fields.append(self.trt.PluginField(name, np.array([value], np.int32), types.INT32))
            else:
                plugin_fields.append(self.trt.PluginField(name, np.array([value], np.float32), types.FLOAT32))
        self.session.messages.clear()
        collection = self.trt.PluginFieldCollection(plugin_fields)
        plugin = self.creator.create_plugin("here", collection, self.trt.TensorRTPhase.BUILD)
        return plugin, [text for severity, text in self.session.messages if severity == "error"]


@pytest.fixture
def sink_attention(plugins: Path) -> Iterator[Creator]:
    pytest.importorskip("tensorrt_rtx")
    from flint_builder import plan

    session = plan._session("tensorrt-rtx")
    session.load_plugins(plugins)
    yield Creator(session, "SinkAttention")


def test_creator_asks_for_the_schema_fields(sink_attention: Creator) -> None:
    assert [field.name for field in sink_attention.creator.field_names] == [f.name for f in OPS["SinkAttention"].fields]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"junk": 1}, "unknown field junk"),
        ({"window": None}, "missing field window (one INT32)"),
        ({"window": 1.5}, "field window must be one INT32, found PluginFieldType 1 of length 1"),
        ({"phase": 3}, "field phase must be a string, found PluginFieldType 5 of length 1"),
        ({"phase": "later"}, "field phase must be prefill or decode, found 'later'"),
        ({"num_kv_heads": 0}, "field num_kv_heads must be positive, found 0"),
    ],
)
def test_wrong_fields_give_an_error_and_no_plugin(
    change: dict[str, FieldValue | None], message: str, sink_attention: Creator
) -> None:
    fields = {name: value for name, value in (FULL_DECODE | change).items() if value is not None}
    assert sink_attention.create(fields) == (None, [f"flint::SinkAttention (layer here): {message}"])


def test_right_fields_give_a_plugin(sink_attention: Creator) -> None:
    plugin, errors = sink_attention.create(FULL_DECODE)
    assert plugin is not None
    assert not errors
