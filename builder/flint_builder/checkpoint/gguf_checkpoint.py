"""The NVFP4 checkpoint: one GGUF file, with config and tokenizer beside it or from the BF16 directory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flint_builder.checkpoint import block_scales
from flint_builder.checkpoint.base import Checkpoint, Piece, count, stacked_rows
from flint_builder.checkpoint.datafile import DataFile, UInt8
from flint_builder.checkpoint.gguf import read_header
from flint_builder.checkpoint.gguf_metadata import ARCHITECTURE, UNIT_SCALES_KEY, check_metadata, says_scales_are_one
from flint_builder.checkpoint.names import gguf_name, input_scale_name, scale_names
from flint_builder.checkpoint.tensors import Rows, StoredTensor
from flint_builder.weights import Source, WeightFile
from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError
from flint_runtime.small_files import listed

logger = logging.getLogger(__name__)


class GgufCheckpoint(Checkpoint):
    """An NVFP4 GGUF file. `config_path` is the config.json to compare it with.

    Raises:
        CheckpointError: damaged, another architecture, FP4 activations, or a contradiction to config.json.
    """

    weights = "nvfp4"

    def __init__(
        self, path: Path, config_path: Path, config: ModelConfig, assets: Mapping[str, bytes], lenient_scales: bool
    ) -> None:
        header = read_header(DataFile(path))
        check_metadata(header, config, config_path)
        super().__init__(config, str(path), assets, header.tensors)
        self._unit_scales = says_scales_are_one(header)
        self._lenient = lenient_scales
        self._lock = threading.Lock()

    def pieces(self, source: Source) -> list[Piece]:
        name, (experts, rows) = gguf_name(source.name), stacked_rows(source)
        return [Piece(name, source.shape, expert * rows, rows) for expert in range(experts)]

    def companions(self, names: Iterable[str]) -> set[str]:
        packed = [name for name in names if self.tensors[name].dtype == "NVFP4"]
        return {name for tensor in packed for name in (*scale_names(tensor), input_scale_name(tensor))}

    def check(self, files: Sequence[WeightFile]) -> None:
        super().check(files)
        packed = [name for name, tensor in self.tensors.items() if tensor.dtype == "NVFP4"]
        without = [name for name in packed if self._scale_of(name) is None]
        self.tensors_without_scale = len(without)
        if without and not self._unit_scales:
            raise CheckpointError(
                f"{self.source} has {count(without, 'NVFP4 tensor')} without a tensor scale: {listed(without)}. "
                f"Expected {scale_names(without[0])[0]} and the like; without its scale a tensor has other values. "
                "Convert the checkpoint again. A converter that leaves out scales of 1 must say so: "
                f"{ARCHITECTURE}.{UNIT_SCALES_KEY} = 1 in the metadata."
            )
        inputs = [name for name in map(input_scale_name, packed) if name in self.tensors]
        if inputs:
            logger.warning(
                "%s has %s of activations, which are not used: Flint runs NVFP4 weights with BF16 activations (W4A16).",
                self.source,
                count(inputs, "scale"),
            )

    def _scale_of(self, name: str) -> StoredTensor | None:
        """The tensor scale of the NVFP4 tensor `name`, under either of its names."""
        found = [self.tensors[scale] for scale in scale_names(name) if scale in self.tensors]
        if len(found) > 1:
            raise CheckpointError(
                f"{self.source}: {name} has two tensor scales, {found[0].name} and {found[1].name}; which one holds is "
                "not known. Convert the checkpoint again."
            )
        return found[0] if found else None

    def scales(self, source: Source) -> npt.NDArray[np.float32]:
        lead = source.shape[:-2]
        tensor = self._scale_of(gguf_name(source.name))
        if tensor is None:
            return np.ones(lead, np.float32)
        name = tensor.name
        if tensor.dtype != "F32" or tensor.shape not in ((), (1,), lead):
            wanted = "F32, one value" + (f" or [{lead[0]}]" if lead else "")
            raise CheckpointError(
                f"{tensor.file}: tensor scale {name} is {tensor.describe()}, expected {wanted}. "
                "The file is damaged or was made by an unknown converter."
            )
        stored = np.empty(tensor.bytes, np.uint8)
        tensor.file.read_into(tensor.offset, [stored], f"tensor {name}")
        values = stored.view("<f4")
        for index, value in enumerate(values):
            if not np.isfinite(value) or value < 0:
                raise CheckpointError(
                    f"{tensor.file}: tensor scale {name}[{index}] is {value}, expected a finite number that is not "
                    "negative. The file is damaged; download it again."
                )
        return np.broadcast_to(values.reshape(lead if tensor.shape == lead else ()), lead)

    def scale_bytes(self, source: Source) -> int:
        tensor = self._scale_of(gguf_name(source.name))
        return tensor.bytes if tensor else 0

    def normalize(self, rows: Rows, first: int, blocks: UInt8) -> None:
        scales = block_scales.scale_bytes(blocks)
        wrong = block_scales.irregular(scales)
        if wrong is None:
            return
        refused = scales == block_scales.UNREPRESENTABLE_SCALE if self._lenient else wrong
        if refused.any():
            flat = refused.reshape(-1, refused.shape[-1])
            row, block = (int(i) for i in np.argwhere(flat)[0])
            found = int(scales.reshape(flat.shape)[row, block])
            raise CheckpointError(
                f"{rows.tensor.file}: tensor {rows.tensor.name}, {rows.where(first + row)}, block {block} of 16 values "
                f"has the scale byte 0x{found:02X}, expected 0x00 to 0x7E (E4M3, not negative, not NaN). "
                + self._hint()
            )
        block_scales.set_scale_bytes(blocks, block_scales.as_ggml(scales))
        with self._lock:
            self.lenient_scales += int(wrong.sum())

    def _hint(self) -> str:
        if self._lenient:
            return "ggml decodes 0xFF as 480, which no E4M3 scale holds; the file cannot be repacked."
        return "The file is damaged, or its converter was wrong; --lenient-scales decodes such bytes as ggml does."
