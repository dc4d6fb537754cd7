"""Servers on free ports: over a core that answers from a script, and over flint-nano."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.manifest import Limits
from tests.runtime.engines import build_reference_engine
from tests.runtime.fake_core import FakeCore, fake_engine
from tests.runtime.server.serving import Served, says, serving
from tests.shapes import NANO_DIRECTORY


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeCore, Served]]:
    core = FakeCore()
    with AsyncLLM.from_factory(lambda: fake_engine(core)) as llm, serving(llm) as server:
        yield core, server


@pytest.fixture
def core(shared: tuple[FakeCore, Served]) -> FakeCore:
    """Answers every request with a thought and a sentence."""
    core = shared[0]
    core.answer, core.before_step = says("7 + 5 is 12.</think>It is 12."), lambda: None
    core.aborted.clear()
    return core


@pytest.fixture
def server(shared: tuple[FakeCore, Served], core: FakeCore) -> Served:
    """A server that the tests of a file share. Who ends its engine makes one of its own."""
    return shared[1]


@pytest.fixture(scope="session")
def nano_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served-nano") / "engine"
    return build_reference_engine(NANO_DIRECTORY, directory, Limits(max_batch=16, max_context=512, prefill_chunk=96))


@pytest.fixture(scope="module")
def nano(nano_engine: Path) -> Iterator[Served]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny
    with AsyncLLM(nano_engine, "reference") as llm, serving(llm) as server:
        yield server
    torch.set_num_threads(threads)
