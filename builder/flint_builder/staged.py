"""Opening an engine before it is published, as the runtime will: as far as that needs neither a GPU nor torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from flint_runtime.engine import Engine, size_problem
from flint_runtime.errors import EngineError, FlintError
from flint_runtime.executors.engine_check import check_contents
from flint_runtime.manifest import Manifest
from flint_runtime.tokenizer import Tokenizer


def check_opens(directory: Path, manifest: Manifest) -> None:
    """Read back what was written: manifest, files, graphs, tokenizer with template and generation config.

    The checkpoint was checked before, so what fails here is a bug of the build, or of the disk.

    Raises:
        FlintError: the runtime would refuse the engine; nothing is to be published.
    """
    try:
        if Manifest.model_validate_json(manifest.model_dump_json()) != manifest:
            raise EngineError("engine.json would not say what was built.")
        problems = [problem for entry in manifest.files if (problem := size_problem(directory, entry))]
        if problems:
            raise EngineError(f"{problems[0]}.")
        check_contents(Engine(directory, manifest))
        Tokenizer(directory)
    except (EngineError, ValidationError) as error:
        raise FlintError(
            f"The engine that was built cannot be opened, so it is not published: {' '.join(str(error).split())} "
            "This is a bug of build-engine; please report it with the command and the checkpoint's name."
        ) from error
