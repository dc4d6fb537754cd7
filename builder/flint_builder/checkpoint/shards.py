"""Files that are parts of a checkpoint by their names alone, such as "a-00001-of-00003.gguf"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flint_builder.checkpoint.names import shard_of
from flint_runtime.errors import CheckpointError

INDEX_SUFFIX = ".safetensors.index.json"


def refuse_parts(files: Sequence[Path]) -> None:
    """Raise CheckpointError where every one of some weight files is one part of several.

    A GGUF file must be whole. Parts of safetensors need the index that ties them together.
    """
    found = [shard_of(file.name) for file in files]
    parts = [part for part in found if part is not None and part[1] > 1]
    if not parts or len(parts) < len(found):
        return
    first, total = files[0], parts[0][1]
    if first.suffix == ".gguf":
        raise CheckpointError(
            f"{first} is part {parts[0][0]} of {total} by its name. Flint is built from one file; merge the parts "
            "(llama-gguf-split --merge) and pass the result."
        )
    indexes = sorted(first.parent.glob(f"*{INDEX_SUFFIX}"))
    if indexes:
        raise CheckpointError(
            f"{first} is part {parts[0][0]} of {total} by its name. Pass its directory, or {indexes[0]}, which names "
            "all parts."
        )
    raise CheckpointError(
        f"{first.parent} holds {len(set(parts))} of {total} parts of a checkpoint, such as {first.name}, but no index "
        f"that names them (model{INDEX_SUFFIX}). The download is incomplete; download the index and all parts."
    )
