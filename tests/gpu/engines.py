"""flint-nano engines for tests on a GPU, and prompts for them.

The builder needs packages that a GPU machine may lack, so engines can be built elsewhere and carried:

    python -m tests.gpu.engines DIRECTORY sm90        # where the builder is installed
    FLINT_NANO_ENGINES=DIRECTORY pytest tests/gpu     # on the GPU machine

Without the variable they are built on the spot.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Literal, get_args

from tests.shapes import NANO_DIRECTORY

Weights = Literal["nvfp4", "bf16"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
ENVIRONMENT_VARIABLE = "FLINT_NANO_ENGINES"
MAX_BATCH, MAX_CONTEXT, PREFILL_CHUNK = 4, 512, 160
_PROMPTS_NAME = "prompts.json"


def build(weights: Weights, target: str, directory: Path) -> Path:
    """Build an engine of the plugin host and return its directory."""
    from flint_builder.build import BuildOptions, build_engine, plan_build

    options = BuildOptions(
        str(NANO_DIRECTORY), (target,), directory / weights, backend="plugin-host", weights=weights,
        max_batch=MAX_BATCH, max_context=MAX_CONTEXT, prefill_chunk=PREFILL_CHUNK, force=True,
    )  # fmt: skip
    build_engine(plan_build(options))
    return directory / weights


def make_prompts(count: int = 12) -> list[list[int]]:
    """Token ids of conversations that flint-nano was not trained on."""
    from flint_runtime.tokenizer import Tokenizer
    from tests.tools.nano_data import chat_template, held_out_samples, render_prompt

    tokenizer, render = Tokenizer(NANO_DIRECTORY), chat_template()
    return [tokenizer.encode(render_prompt(render, sample)) for sample in held_out_samples(3, count)]


def nano_engine(weights: Weights, target: str, directory: Path) -> Path:
    """An engine that was carried here, or one built in `directory`."""
    carried = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(carried) / weights if carried else build(weights, target, directory)


def nano_prompts() -> list[list[int]]:
    """Prompts that were carried here, or made."""
    carried = os.environ.get(ENVIRONMENT_VARIABLE)
    if not carried:
        return make_prompts()
    prompts: list[list[int]] = json.loads((Path(carried) / _PROMPTS_NAME).read_text())
    return prompts


def main(directory: Path, target: str) -> None:
    """Build what the tests need into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for weights in WEIGHTS:
        build(weights, target, directory)
    (directory / _PROMPTS_NAME).write_text(json.dumps(make_prompts()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
