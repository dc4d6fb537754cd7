"""An engine small enough for everything, and a GPU that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flint_plugins import library
from flint_plugins.library import LibraryError
from flint_runtime.executors import cuda
from flint_runtime.manifest import Limits

LIMITS = Limits(max_batch=3, max_context=200, prefill_chunk=48)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread, so that its sums have one order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def plugins() -> Path:
    """The plugin library."""
    try:
        return library.find_library()
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["bf16", "nvfp4"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, plugins: Path) -> Path:
    """An engine of three layers, one of each kind, for what the library has code for; with plans for a fake TensorRT."""
    from tests.runtime.engines import build_reference_engine, rewrite_manifest
    from tests.tools.checkpoints import flint_config, random_checkpoint

    root = tmp_path_factory.mktemp("engine")
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = flint_config(
        layers=3, hidden=128, experts=8, heads=8, kv_heads=1, head_dim=128, intermediate=128, moe_intermediate=64,
        shared_intermediate=64, vocab=768, window=33, context=4096, layer_types=kinds, mlp_only_layers=[0],
    )  # fmt: skip
    path = root / "model.gguf" if request.param == "nvfp4" else root / "model"
    checkpoint = random_checkpoint(path, config, request.param, seed=5)
    engine = build_reference_engine(
        checkpoint, root / "engine", LIMITS, root if path.suffix else checkpoint, backend="tensorrt-rtx"
    )
    info = library.library_info(plugins)
    rewrite_manifest(
        engine, plugins_version=info.version, targets=list(info.architectures), backend_version="1.7.1.116"
    )
    return engine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, plugins: Path) -> object:
    """A device that the library has code for: a FakeCuda."""
    from tests.runtime.fake_cuda import FakeCuda

    number = int(library.library_info(plugins).architectures[0][2:])
    found = FakeCuda(capability=divmod(number, 10))
    monkeypatch.setattr(cuda, "_runtime", lambda: found)
    return found
