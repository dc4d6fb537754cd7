"""A checkpoint, whatever its format: where the weights stand, and whether they are what the engine needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from flint_builder.checkpoint.datafile import UInt8
from flint_builder.checkpoint.tensors import Rows, StoredTensor
from flint_builder.weights import Recipe, Source, WeightFile
from flint_plugins import layout
from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError, UsageError
from flint_runtime.manifest import WeightFormat
from flint_runtime.small_files import listed

_COPIED = ("BF16", "F32")


@dataclass(frozen=True)
class Piece:
    """Where (a part of) a source should stand: `rows` rows from row `first` of the tensor `name` with `shape`."""

    name: str
    shape: tuple[int, ...]
    first: int
    rows: int


class Checkpoint(ABC):
    """An open checkpoint. Nothing but headers and small files is read before `check`.

    Attributes:
        config: the model.
        weights: format of the packed matrices.
        router_dtype: the routers' own type; "f32" if they differ between layers.
        source: what was opened, for people.
        assets: contents by name of tokenizer.json, and of tokenizer_config.json, chat_template.jinja and
            generation_config.json where there are; see `assets.read_assets`.
        bytes: bytes of all tensors, which is what a repack reads.
        tensors_without_scale: NVFP4 tensors whose tensor scale is 1 because the file says so; known after `check`.
        lenient_scales: block scales decoded as ggml does though they are not E4M3; grows while blocks are read.
    """

    weights: WeightFormat

    def __init__(
        self,
        config: ModelConfig,
        source: str,
        assets: Mapping[str, bytes],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        self.config = config
        self.source = source
        self.assets = dict(assets)
        self.tensors = dict(tensors)
        self.bytes = sum(tensor.bytes for tensor in self.tensors.values())
        self.tensors_without_scale = 0
        self.lenient_scales = 0
        self.router_dtype = self._router_dtype()

    @abstractmethod
    def pieces(self, source: Source) -> list[Piece]:
        """Where a source stands: one piece per expert of a stacked source [E, N, K], else one."""

    def companions(self, names: Iterable[str]) -> set[str]:
        """Names of stored tensors that belong to the tensors `names`, such as their scales."""
        return set()

    def scales(self, source: Source) -> npt.NDArray[np.float32]:
        """Tensor scales of an NVFP4 source: float32 [E] of a stacked one, else [].

        Raises:
            CheckpointError: of the wrong shape or type, negative or not finite.
        """
        raise UsageError(f"{self.source} holds {self.weights} weights, which have no tensor scales.")

    def scale_bytes(self, source: Source) -> int:
        """Bytes that `scales` reads of the file."""
        return 0

    def normalize(self, rows: Rows, first: int, blocks: UInt8) -> None:
        """Check what was read from a packed tensor, in place where it needs correction; safe from several threads.

        Args:
            rows: what was read from.
            first: the row, counted within `rows`, at which the data begin.
            blocks: uint8 [..., row_bytes], as stored.
        Raises:
            CheckpointError: data that the kernels cannot represent, with tensor, row and block.
        """
        return

    def rows(self, source: Source) -> list[Rows]:
        """The stored rows of a source, one run per expert. Call `check` first.

        Rows of a vector: one row with all its values.
        """
        return [Rows(self.tensors[piece.name], piece.first, piece.rows) for piece in self.pieces(source)]

    @property
    def counts(self) -> dict[str, int]:
        """What was made up for, for the build report and the manifest; final when all was read."""
        return {"tensors_without_scale": self.tensors_without_scale, "lenient_scales": self.lenient_scales}

    def check(self, files: Sequence[WeightFile]) -> None:
        """Verify that the checkpoint holds exactly what the plan needs.

        Raises:
            CheckpointError: tensors missing, of another shape or type, unknown, or with unusable tensor scales.
        """
        recipes = [recipe for file in files for recipe in file.recipes]
        used: set[str] = set()
        missing: list[str] = []
        for recipe in recipes:
            for source in recipe.sources:
                for piece in self.pieces(source):
                    used.add(piece.name)
                    if piece.name not in self.tensors:
                        missing.append(piece.name)
        missing = list(dict.fromkeys(missing))
        if missing:
            raise CheckpointError(
                f"{self.source} lacks {count(missing, 'tensor')} that its config asks for: {listed(missing)}. "
                "The checkpoint is incomplete, or its config.json belongs to another model."
            )
        for recipe in recipes:
            self._check_recipe(recipe)
        unknown = sorted(self.tensors.keys() - used - self.companions(used))
        if unknown:
            raise CheckpointError(
                f"{self.source} has {count(unknown, 'tensor')} that Flint does not know: {listed(unknown)}. Every "
                "tensor must be used, so that no part of a model is silently ignored. Pass the config.json that "
                "belongs to this checkpoint, or a checkpoint that was converted for Flint."
            )

    def _check_recipe(self, recipe: Recipe) -> None:
        packed: Literal["NVFP4", "BF16"] = "NVFP4" if self.weights == "nvfp4" else "BF16"
        allowed = _COPIED if recipe.kind == "copy" else (packed,)
        for source in recipe.sources:
            for piece in self.pieces(source):
                tensor = self.tensors[piece.name]
                if tensor.shape != piece.shape or tensor.dtype not in allowed:
                    raise CheckpointError(
                        f"{tensor.file}: tensor {tensor.name} is {tensor.describe()}, expected "
                        f"{' or '.join(allowed)} {list(piece.shape)}. {self._advice(tensor, piece)}"
                    )
            if recipe.kind == "copy":
                continue
            rows, columns = source.shape[-2:]
            multiple = layout.PANEL_ROWS // (len(recipe.sources) if recipe.kind == "pack_gate_up" else 1)
            if rows % multiple or columns % layout.TILE_COLUMNS:
                raise CheckpointError(
                    f"{self.source}: {source.name} {list(source.shape)} does not fit the kernels: rows must be a "
                    f"multiple of {multiple}, columns of {layout.TILE_COLUMNS}."
                )
            if self.weights == "nvfp4":
                self.scales(source)

    def _advice(self, tensor: StoredTensor, piece: Piece) -> str:
        if tensor.shape != piece.shape:
            return "The file belongs to another model than its config.json."
        return "Weights are repacked, never converted to another type; use a checkpoint of the released types."

    def _router_dtype(self) -> Literal["bf16", "f32"]:
        config = self.config
        shape = (config.num_experts, config.hidden_size)
        sources = [
            Source(f"model.layers.{layer}.mlp.gate.weight", shape)
            for layer in range(config.num_hidden_layers)
            if not config.is_dense(layer)
        ]
        names = [piece.name for source in sources for piece in self.pieces(source)]
        found = {self.tensors[name].dtype for name in names if name in self.tensors}
        return "bf16" if found == {"BF16"} else "f32"


def stacked_rows(source: Source) -> tuple[int, int]:
    """(experts, rows of each) of a source: (E, N) of [E, N, K], (1, N) of [N, K], (1, 1) of a vector."""
    *lead, rows, _ = (1, 1, *source.shape)
    return prod(lead), rows


def count(names: Sequence[str], what: str) -> str:
    """How many there are, for messages: "3 tensors"."""
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''}"
