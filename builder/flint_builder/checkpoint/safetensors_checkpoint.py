"""The BF16 checkpoint: a Hugging Face directory, or one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flint_builder.checkpoint.base import Checkpoint, Piece, stacked_rows
from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.names import split_experts
from flint_builder.checkpoint.safetensors import read_index, read_tensors
from flint_builder.checkpoint.tensors import StoredTensor
from flint_builder.weights import Source
from flint_runtime.config import ModelConfig


class SafetensorsCheckpoint(Checkpoint):
    """A BF16 model in safetensors files. `path` is the one file, or the index of several.

    The experts may stand one by one, stacked per projection, or with gate and up fused as transformers keeps them in
    memory; which of these is seen by the names.

    Raises:
        CheckpointError: a file is missing, damaged, or belongs to another checkpoint.
    """

    weights = "bf16"

    def __init__(self, path: Path, config: ModelConfig, assets: Mapping[str, bytes]) -> None:
        tensors = _with_known_names(read_index(path) if path.suffix == ".json" else read_tensors(DataFile(path)))
        super().__init__(config, str(path), assets, tensors)

    def pieces(self, source: Source) -> list[Piece]:
        split = split_experts(source.name)
        if split is None:
            _, rows = stacked_rows(source)
            return [Piece(source.name, source.shape, 0, rows)]
        experts, projection = split
        count, rows, columns = source.shape
        if source.name in self.tensors:
            return [Piece(source.name, source.shape, e * rows, rows) for e in range(count)]
        if projection == "down" and f"{experts}.down_proj" in self.tensors:
            return [Piece(f"{experts}.down_proj", source.shape, e * rows, rows) for e in range(count)]
        if projection != "down" and f"{experts}.gate_up_proj" in self.tensors:
            shape = (count, 2 * rows, columns)
            second = rows if projection == "up" else 0
            return [Piece(f"{experts}.gate_up_proj", shape, 2 * e * rows + second, rows) for e in range(count)]
        return [Piece(f"{experts}.{e}.{projection}_proj.weight", (rows, columns), 0, rows) for e in range(count)]


def _with_known_names(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Take transformers' own name of the sinks, `self_attn.sinks`, for the checkpoint's."""
    for name in [name for name in tensors if name.endswith(".self_attn.sinks")]:
        known = name.removesuffix("sinks") + "softmax_offset"
        if known not in tensors:
            tensors[known] = tensors.pop(name)
    return tensors
