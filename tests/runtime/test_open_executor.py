"""Which executor is taken."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from flint_plugins import library
from flint_runtime.engine import Engine
from flint_runtime.errors import UnsupportedError
from flint_runtime.executors import cuda, open_executor, tensorrt
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.tensorrt import TensorRtExecutor
from tests.runtime.engines import rewrite_manifest
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.fake_tensorrt import FakeTensorRt


@pytest.fixture(autouse=True)
def _library(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the tests has no library of its own."""
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(plugins))
    tensorrt._session.cache_clear()


def test_auto_takes_tensorrt_for_an_engine_with_plans(
    directory: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", FakeTensorRt(fake))  # type: ignore[arg-type]
    assert isinstance(open_executor(Engine.open(directory)), TensorRtExecutor)


def test_auto_takes_the_plugin_host_where_tensorrt_does_not_run(
    directory: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert isinstance(open_executor(Engine.open(directory)), PluginHostExecutor)


def test_auto_takes_the_plugin_host_for_an_engine_without_plans(
    directory: Path, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", FakeTensorRt(fake))  # type: ignore[arg-type]
    engine = shutil.copytree(directory, tmp_path / "engine")
    rewrite_manifest(engine, backend="plugin-host", backend_version="")
    assert isinstance(open_executor(Engine.open(engine)), PluginHostExecutor)


@pytest.mark.parametrize("capability", [(7, 5), None])
def test_auto_takes_the_reference_where_no_gpu_serves(
    capability: tuple[int, int] | None, directory: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UnsupportedError("no cuda-bindings here")

    if capability:
        fake.capability = dict(zip(("major", "minor"), capability, strict=True))
    else:
        monkeypatch.setattr(cuda, "_runtime", missing)
    assert isinstance(open_executor(Engine.open(directory)), ReferenceExecutor)


def test_what_is_asked_for_is_taken_or_refused(
    directory: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(directory)
    assert isinstance(open_executor(engine, "plugin-host"), PluginHostExecutor)
    assert isinstance(open_executor(engine, "reference"), ReferenceExecutor)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(UnsupportedError, match="tensorrt_rtx does not load here"):
        open_executor(engine, "tensorrt")


def test_a_missing_torch_names_its_extra(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flint_runtime.executors.reference", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'flint-tensorrt\[reference\]'"):
        open_executor(Engine.open(directory), "reference")
