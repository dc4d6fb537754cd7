"""An engine small enough for everything, and a GPU that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flint_plugins import library
from flint_runtime.executors import cuda
from flint_runtime.manifest import Limits, WeightFormat

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
    return library.find_library()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory, plugins: Path) -> Path:
    """An NVFP4 engine of three layers, for what the library has code for; it has plans for a fake TensorRT, too."""
    return _build("nvfp4", tmp_path_factory.mktemp("nvfp4"), plugins)


@pytest.fixture(scope="session")
def bf16_directory(tmp_path_factory: pytest.TempPathFactory, plugins: Path) -> Path:
    """The same in BF16."""
    return _build("bf16", tmp_path_factory.mktemp("bf16"), plugins)


def _build(weights: WeightFormat, root: Path, plugins: Path) -> Path:
    from tests.runtime.engines import build_reference_engine, rewrite_manifest
    from tests.tools.checkpoints import flint_config, random_checkpoint

    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = flint_config(
        layers=3, hidden=128, experts=8, heads=8, kv_heads=1, head_dim=128, intermediate=128, moe_intermediate=64,
        shared_intermediate=64, vocab=768, window=33, context=4096, layer_types=kinds, mlp_only_layers=[0],
    )  # fmt: skip
    path = root / "model.gguf" if weights == "nvfp4" else root / "model"
    checkpoint = random_checkpoint(path, config, weights, seed=5)
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
