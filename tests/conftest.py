"""Fixtures that several test folders share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shapes import NANO_DIRECTORY


@pytest.fixture(scope="session")
def random_nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random checkpoint of flint-nano's shape, as NVFP4 GGUF and as BF16 safetensors."""
    from tests.tools.checkpoints import random_checkpoint  # tests on a GPU machine do without the builder's libraries

    directory = tmp_path_factory.mktemp("random-nano")
    config = json.loads((NANO_DIRECTORY / "config.json").read_text())
    random_checkpoint(directory, config, format="bf16", seed=1)
    random_checkpoint(directory / "nano.gguf", config, format="nvfp4", seed=1)
    return directory
