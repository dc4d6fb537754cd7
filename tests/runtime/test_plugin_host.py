"""What the plugin-host executor, and with it every GPU executor, refuses; without a GPU (see fake_cuda).

What it computes is in test_executors.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flint_plugins import library
from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, ResourceError, UnsupportedError
from flint_runtime.executors import cuda, gpu, gpu_memory, plugin_host, weight_loader
from flint_runtime.executors.host_library import HostError, HostLibrary
from flint_runtime.executors.plugin_host import PluginHostExecutor
from tests.runtime.fake_cuda import FakeCuda


@pytest.fixture
def host(directory: Path, fake: FakeCuda, plugins: Path) -> PluginHostExecutor:
    return PluginHostExecutor(Engine.open(directory), plugins)


def test_no_gpu_is_an_error_that_says_so(directory: Path, plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("no cuda-bindings here")

    monkeypatch.setattr(cuda, "_runtime", missing)
    with pytest.raises(UnsupportedError, match="plugin-host executor needs an NVIDIA GPU, but no cuda-bindings here"):
        PluginHostExecutor(Engine.open(directory), plugins)


def test_another_gpu_is_refused(directory: Path, fake: FakeCuda, plugins: Path) -> None:
    fake.capability = {"major": 7, "minor": 5}
    with pytest.raises(EngineError, match=r"this GPU is sm75\. Rebuild"):
        PluginHostExecutor(Engine.open(directory), plugins)


def test_a_library_without_code_for_the_gpu_is_refused(
    directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = library.library_info(plugins)
    other = dataclasses.replace(info, architectures=("sm999",))
    monkeypatch.setattr(gpu, "check_library", lambda *_, **__: other)
    with pytest.raises(EngineError, match=rf"holds GPU code for sm999; this GPU is {info.architectures[0]}"):
        PluginHostExecutor(Engine.open(directory), plugins)


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(
    directory: Path, fake: FakeCuda, plugins: Path
) -> None:
    """Case E9."""
    fake.total = 1 << 20
    with pytest.raises(ResourceError, match=r"does not fit this GPU[\s\S]*weights[\s\S]*Not even one page") as error:
        PluginHostExecutor(Engine.open(directory), plugins)
    assert error.value.exit_code == 5
    assert not fake.device


def test_pools_that_do_not_fit_are_refused_with_the_largest_context(host: PluginHostExecutor, fake: FakeCuda) -> None:
    """Case E9."""
    fake.total = fake.used + gpu_memory.HEADROOM_BYTES + (1 << 20)
    with pytest.raises(ResourceError) as error:
        host.allocate(pages=1000, slots=1, sample_slots=1)
    message = str(error.value)
    assert "KV cache, full layers (1,000 pages of 64 tokens)" in message
    assert "The largest context that would fit is " in message
    context = int(message.split("would fit is ")[1].split(" ")[0].replace(",", ""))
    host.allocate(pages=-(-context // 64), slots=1, sample_slots=1)


def test_a_damaged_graph_is_refused(
    directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(directory)
    monkeypatch.setattr(gpu, "plan_weights", lambda paths: weight_loader.plan_weights(paths[1:]))
    with pytest.raises(EngineError, match=r"prefill\.onnx does not fit .* the input embedding, rope is no step array"):
        PluginHostExecutor(engine, plugins)


def test_a_node_that_the_plugins_refuse_is_named(
    directory: Path, fake: FakeCuda, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise HostError("flint::Linear (layer x): no")

    monkeypatch.setattr(plugin_host, "build_graph", refuse)
    with pytest.raises(EngineError, match=r"Engine .*: flint::Linear \(layer x\): no\. Rebuild it"):
        PluginHostExecutor(Engine.open(directory), plugins)


def test_the_library_has_a_host(plugins: Path) -> None:
    HostLibrary(plugins)
