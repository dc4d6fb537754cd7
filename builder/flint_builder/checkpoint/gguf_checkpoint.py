"""The NVFP4 checkpoint: one GGUF file, with config and tokenizer beside it or from the BF16 directory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flint_builder.checkpoint import block_scales
from flint_builder.checkpoint.base import Checkpoint, Piece, stacked_rows
from flint_builder.checkpoint.datafile import DataFile, UInt8
from flint_builder.checkpoint.gguf import GgufHeader, Skipped, Value, read_header
from flint_builder.checkpoint.names import gguf_name, scale_name
from flint_builder.checkpoint.tensors import Rows
from flint_builder.weights import Source, WeightFile
from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError

_ARCHITECTURE = "flint"
# Metadata below "<architecture>." that must agree with config.json. Context length, window and feed_forward_length are
# left out: converters do not agree on what they count (tensor shapes tell the last).
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_FLOAT32_TOLERANCE = 1e-6
"""Relative; GGUF stores floats in 32 bits."""


class GgufCheckpoint(Checkpoint):
    """An NVFP4 GGUF file. `config_path` is the config.json to compare it with.

    Raises:
        CheckpointError: damaged, another architecture, FP4 activations, or a contradiction to config.json.
    """

    weights = "nvfp4"

    def __init__(
        self, path: Path, config_path: Path, config: ModelConfig, assets: Mapping[str, Path], lenient_scales: bool
    ) -> None:
        header = read_header(DataFile(path))
        _check_kind(header)
        _check_agreement(header, config, config_path)
        super().__init__(config, str(path), assets, header.tensors)
        self._lenient = lenient_scales
        self._lock = threading.Lock()

    def pieces(self, source: Source) -> list[Piece]:
        name, (experts, rows) = gguf_name(source.name), stacked_rows(source)
        return [Piece(name, source.shape, expert * rows, rows) for expert in range(experts)]

    def companions(self, names: Iterable[str]) -> set[str]:
        return {scale_name(name) for name in names if self.tensors[name].dtype == "NVFP4"}

    def check(self, files: Sequence[WeightFile]) -> None:
        super().check(files)
        self.tensors_without_scale = len(self.companions(self._weights()) - self.tensors.keys())

    def _weights(self) -> list[str]:
        return [name for name in self.tensors if not name.endswith(".scale")]

    def scales(self, source: Source) -> npt.NDArray[np.float32]:
        name = scale_name(gguf_name(source.name))
        lead = source.shape[:-2]
        tensor = self.tensors.get(name)
        if tensor is None:
            return np.ones(lead, np.float32)
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
        tensor = self.tensors.get(scale_name(gguf_name(source.name)))
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


def _check_kind(header: GgufHeader) -> None:
    """Refuse other architectures, FP4 activations, and one part of several."""
    architecture = header.metadata.get("general.architecture", _ARCHITECTURE)
    if architecture != _ARCHITECTURE:
        raise CheckpointError(
            f"{header.file}: general.architecture is {architecture!r}, expected {_ARCHITECTURE!r}. "
            "Pass a Flint checkpoint."
        )
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"{header.file} is one of {parts} parts (split.count); merge them into one file (llama-gguf-split --merge)."
        )
    marked = [key for key, value in header.metadata.items() if key.endswith("prec_a4") and _is_set(value)]
    marked += [name for name in header.tensors if name.endswith("prec_a4")]
    if marked:
        raise CheckpointError(
            f"{header.file}: {marked[0]} is set: the model expects activations in FP4, which are not supported; "
            "Flint runs NVFP4 weights with BF16 activations. Use a file made for weight-only NVFP4 (W4A16)."
        )


def _is_set(value: Value) -> bool:
    if isinstance(value, tuple):
        return any(value)
    return value.count > 0 if isinstance(value, Skipped) else bool(value)


def _check_agreement(header: GgufHeader, config: ModelConfig, config_path: Path) -> None:
    """Compare metadata and the vocabulary with config.json; absent keys are no contradiction."""
    for key, field in _KEYS.items():
        found, wanted = header.metadata.get(f"{_ARCHITECTURE}.{key}"), getattr(config, field)
        if found is None or isinstance(found, tuple | Skipped):
            continue  # absent, or one value per layer: the tensors' shapes tell
        if isinstance(found, str) or not isclose(found, wanted, rel_tol=_FLOAT32_TOLERANCE):
            _disagree(f"{_ARCHITECTURE}.{key} is {found!r}", header, f"{field} is {wanted}", config_path)
    embedding = header.tensors.get("token_embd.weight")
    if embedding and len(embedding.shape) == 2 and embedding.shape[0] != config.vocab_size:
        theirs = f"token_embd.weight has {embedding.shape[0]} rows (vocabulary)"
        _disagree(theirs, header, f"vocab_size is {config.vocab_size}", config_path)


def _disagree(theirs: str, header: GgufHeader, ours: str, config_path: Path) -> None:
    raise CheckpointError(
        f"{theirs} in {header.file}, but {ours} in {config_path}: the two belong to different models. "
        "Pass the directory of the BF16 checkpoint that the GGUF file was made from with --hf-config."
    )
