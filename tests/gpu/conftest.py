"""What tests on a GPU share: the marker, a clean skip where there is no CUDA device, seeds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

_HERE = Path(__file__).parent

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]  # They import torch; it serves tests only.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where there is no CUDA device."""
    here = [item for item in items if _HERE in item.path.parents]
    if not here:
        return
    import torch

    skip = None if torch.cuda.is_available() else pytest.mark.skip(reason="no CUDA device")
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if skip:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every run and order."""
    import torch

    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def device_architecture() -> str:
    """Such as "sm90"."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
