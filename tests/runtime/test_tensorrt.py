"""The TensorRT executor without a GPU: refusals, bindings, and its calls against a fake module (see fake_tensorrt).

What it computes is in test_executors. That its bindings are those of the real TensorRT-RTX is in
tests/builder/test_bindings.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, UnsupportedError
from flint_runtime.executors import cuda, tensorrt
from flint_runtime.executors.step import RowSampling, SequencePart, Step, build_step
from flint_runtime.executors.tensorrt import TensorRtExecutor
from tests.manifests import manifest
from tests.runtime.conftest import LIMITS
from tests.runtime.engines import rewrite_manifest
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.fake_tensorrt import FakeTensorRt


@pytest.fixture
def trt(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorRt]:
    """The only TensorRT of this process."""
    module = FakeTensorRt(fake)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)  # type: ignore[arg-type]
    tensorrt._session.cache_clear()
    yield module
    tensorrt._session.cache_clear()


@pytest.fixture
def executor(trt: FakeTensorRt, directory: Path, plugins: Path) -> TensorRtExecutor:
    found = TensorRtExecutor(Engine.open(directory), plugins)
    found.allocate(pages=8, slots=3, sample_slots=2)
    return found


def decode(sequences: int, start: int = 0) -> Step:
    return build_step([SequencePart([1], start, [i], i, [(-1, RowSampling())]) for i in range(sequences)])


# --- Refusals -----------------------------------------------------------------------------------------------------


def test_an_engine_without_plans_is_refused() -> None:
    engine = Engine(Path("/e"), manifest(backend="plugin-host", backend_version="", targets=("sm90",)))
    message = r"built for the backend plugin-host and holds no TensorRT plans.*--executor plugin-host.*--target sm90"
    with pytest.raises(EngineError, match=message):
        TensorRtExecutor.check_here(engine)


@pytest.mark.parametrize(("backend", "extra"), [("tensorrt-rtx", "rtx"), ("tensorrt", "tensorrt")])
def test_a_missing_package_names_its_extra(backend: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = backend.replace("-", "_")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=rf"module {module} does not load.*flint-tensorrt\[{extra}\]"):
        TensorRtExecutor.check_here(Engine(Path("/e"), manifest(backend=backend)))


def test_another_version_is_refused(trt: FakeTensorRt) -> None:
    engine = Engine(Path("/e"), manifest(backend_version="1.6.0.1"))
    with pytest.raises(EngineError, match=r"built by tensorrt-rtx 1\.6\.0\.1; here is tensorrt-rtx 1\.7\.1\.116"):
        TensorRtExecutor.check_here(engine)


def test_no_gpu_is_refused(trt: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("no cuda-bindings here")

    monkeypatch.setattr(cuda, "_runtime", missing)
    with pytest.raises(UnsupportedError, match="tensorrt executor needs an NVIDIA GPU, but no cuda-bindings here"):
        TensorRtExecutor.check_here(Engine(Path("/e"), manifest()))


def test_another_gpu_is_refused(trt: FakeTensorRt, fake: FakeCuda) -> None:
    fake.capability = {"major": 9, "minor": 0}
    with pytest.raises(EngineError, match=r"built for sm120; this GPU is sm90\. Rebuild"):
        TensorRtExecutor.check_here(Engine(Path("/e"), manifest()))


def test_a_damaged_plan_is_refused_with_tensorrts_reason(
    trt: FakeTensorRt, directory: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "plan_path", lambda self, phase: directory / "engine.json")
    with pytest.raises(EngineError, match=r"engine\.json cannot be loaded: Magic tag does not match\. Check it"):
        TensorRtExecutor(Engine.open(directory), plugins)


def test_a_plan_of_another_graph_is_refused(
    trt: FakeTensorRt, directory: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tensorrt, "expected_bindings", lambda file: {"token_ids": (True, "INT8", (-1,)), "x": (True, "INT8", ())}
    )
    message = r"does not fit graph/prefill\.onnx and the engine's limits: it lacks x; positions is not in the graph"
    with pytest.raises(EngineError, match=message):
        TensorRtExecutor(Engine.open(directory), plugins)


def test_a_plan_of_the_other_phase_is_refused(
    trt: FakeTensorRt, directory: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same bindings, but takes other sizes."""
    plans = {"prefill": "decode", "decode": "prefill"}
    monkeypatch.setattr(Engine, "plan_path", lambda self, phase: directory / f"plans/{plans[phase]}.plan")
    with pytest.raises(EngineError, match=r"it takes token_ids from \[1\] to \[8\], expected \[1\] to \[48\]"):
        TensorRtExecutor(Engine.open(directory), plugins)


@pytest.mark.parametrize("limit", [{"max_batch": 4}, {"prefill_chunk": 49}])
def test_a_plan_of_other_limits_is_refused(
    limit: dict[str, int], trt: FakeTensorRt, directory: Path, plugins: Path, tmp_path: Path
) -> None:
    engine = shutil.copytree(directory, tmp_path / "engine")
    rewrite_manifest(engine, limits=LIMITS.model_dump() | limit)
    with pytest.raises(EngineError, match=r"\.plan does not fit .* the engine's limits: it takes"):
        TensorRtExecutor(Engine.open(engine), plugins)


def test_differing_bindings_are_named() -> None:
    expected = {"a": (True, "BF16", (-1, 4)), "b": (True, "INT32", (2,)), "c": (False, "FLOAT", (1,))}
    found = {"a": (True, "FLOAT", (-1, 4)), "c": (True, "FLOAT", (1,)), "d": (True, "INT8", ())}
    assert tensorrt.binding_problems(expected, found) == [
        "it lacks b",
        "d is not in the graph",
        "a is input FLOAT [-1, 4], expected input BF16 [-1, 4]",
        "c is input FLOAT [1], expected output FLOAT [1]",
    ]
    assert not tensorrt.binding_problems(expected, expected)


def test_what_tensorrt_refuses_is_an_error_with_its_reason(executor: TensorRtExecutor, trt: FakeTensorRt) -> None:
    step = decode(1)
    for context in trt.contexts:
        context.set_input_shape = lambda name, shape, refuse=context._refuse: refuse(f"{name} is bad")  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"TensorRT refused the shape .* \(decode plan\): .* is bad\."):
        executor.submit("decode", step)


# --- Calls --------------------------------------------------------------------------------------------------------


def test_the_plugins_are_registered_once_per_process(
    executor: TensorRtExecutor, trt: FakeTensorRt, directory: Path, plugins: Path, tmp_path: Path
) -> None:
    assert trt.loaded == [str(plugins.resolve())]
    TensorRtExecutor(Engine.open(directory), plugins)
    copy = tmp_path / plugins.name
    copy.write_bytes(plugins.read_bytes())
    TensorRtExecutor(Engine.open(directory), copy)
    assert len(trt.loaded) == 1
    other = tmp_path / "other.so"
    other.write_bytes(plugins.read_bytes() + b"\0")
    with pytest.raises(UnsupportedError, match="has already loaded the plugin library"):
        TensorRtExecutor(Engine.open(directory), other)


def test_plugins_that_did_not_register_are_named(
    trt: FakeTensorRt, directory: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = trt.get_plugin_registry()
    registry.load_library = lambda path: None
    monkeypatch.setattr(trt, "get_plugin_registry", lambda: registry)
    with pytest.raises(EngineError, match="TensorRT did not load the plugins Embedding, NormQkvRope"):
        TensorRtExecutor(Engine.open(directory), plugins)


def test_updated_states_have_one_address(executor: TensorRtExecutor, trt: FakeTensorRt) -> None:
    executor.run("decode", decode(1))
    _, context = trt.contexts
    for output in ("kv.0.out", "kv.1.out", "token_counts.out", "last_tokens.out"):
        assert context.addresses[output] == context.addresses[output.removesuffix(".out")]
    own = [address for name, address in context.addresses.items() if not name.endswith(".out")]
    assert len(set(own)) == len(own)


def test_decode_is_captured_and_replayed(executor: TensorRtExecutor, trt: FakeTensorRt, fake: FakeCuda) -> None:
    """Twice eagerly, then as a graph, also where other sizes come between."""
    _, context = trt.contexts
    for position, replays in enumerate([0, 0, 1, 2, 3]):
        for sequences in (1, 2):
            executor.run("decode", decode(sequences, position))
            assert fake.replays == (2 * replays if sequences == 2 else max(0, 2 * replays - 1))
    assert context.runs == 10


def test_prefill_is_never_captured(executor: TensorRtExecutor, fake: FakeCuda) -> None:
    for position in range(4):
        executor.run("prefill", decode(1, position))
    assert fake.replays == 0


def test_a_stream_that_cannot_be_captured_runs_eagerly(
    executor: TensorRtExecutor, trt: FakeTensorRt, fake: FakeCuda
) -> None:
    for context in trt.contexts:
        context.is_stream_capturable = lambda stream: False  # type: ignore[method-assign]
    for position in range(4):
        executor.run("decode", decode(1, position))
    assert fake.replays == 0


def test_new_pools_are_bound(executor: TensorRtExecutor, trt: FakeTensorRt) -> None:
    executor.run("decode", decode(1))
    _, context = trt.contexts
    before = context.addresses["kv.1"]
    executor.allocate(pages=80, slots=5, sample_slots=2)
    executor.run("decode", decode(1))
    assert context.addresses["kv.1"] == executor._state_addresses["kv.1"] != before
    assert context.shapes["kv.1"][0] == 5
