"""A tiny Flint checkpoint in both formats, and damage to do to it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt

from flint_builder.checkpoint import Checkpoint, open_checkpoint
from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.gguf import read_header
from flint_builder.weights import WeightFile, weight_files
from tests.shapes import NANO_DIRECTORY
from tests.tools.checkpoints import (
    RandomWeights,
    flint_config,
    hf_specs,
    quantize_checkpoint,
    write_gguf,
    write_hf,
    write_side_files,
)

Arrays = dict[str, npt.NDArray[Any]]

CONFIG = flint_config(
    layers=4,
    hidden=128,
    experts=4,
    top_k=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    intermediate=192,
    moe_intermediate=64,
    shared_intermediate=128,
    vocab=768,
    window=16,
    context=64,
)
"""Layers 0 and 1 are dense, 2 and 3 have experts; layer 2 slides. The vocabulary holds flint-nano's tokenizer."""
MAX_CONTEXT = 48
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 22900000000\n"
GATE = "model.layers.2.mlp.experts.gate_proj.weight"


def weights(seed: int = 0) -> Arrays:
    """Random weights by Hugging Face name: bfloat16 matrices, float32 vectors and routers."""
    random = RandomWeights(seed)
    return {spec.name: random.plain(spec.name, spec.shape) for spec in hf_specs(CONFIG)}


def nvfp4_values(seed: int = 0) -> dict[str, Any]:
    """Quantised weights by GGUF name."""
    return dict(_quantized(seed))


@cache
def _quantized(seed: int) -> dict[str, Any]:
    return quantize_checkpoint(CONFIG, {name: value.astype(np.float32) for name, value in weights(seed).items()})


def nvfp4(directory: Path, values: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write the NVFP4 checkpoint with config and tokenizer; `options` as for `write_gguf`."""
    write_side_files(directory, CONFIG, NANO_DIRECTORY)
    path = directory / "tiny.gguf"
    write_gguf(path, CONFIG, values or nvfp4_values(), **options)
    return path


def bf16(directory: Path, tensors: Arrays | None = None, **options: Any) -> Path:
    """Write the BF16 checkpoint with config and tokenizer; `options` as for `write_hf`."""
    stored = {
        name: value if name.endswith(("mlp.gate.weight", "softmax_offset")) else value.astype(ml_dtypes.bfloat16)
        for name, value in weights().items()
    }
    write_hf(directory, CONFIG, stored if tensors is None else tensors, tokenizer_from=NANO_DIRECTORY, **options)
    return directory


def opened(path: Path, **options: Any) -> tuple[Checkpoint, Sequence[WeightFile]]:
    """Open a checkpoint, plan its engine and check one against the other."""
    checkpoint = open_checkpoint(str(path), **options)
    files = weight_files(checkpoint.config, checkpoint.weights, checkpoint.router_dtype, MAX_CONTEXT)
    checkpoint.check(files)
    return checkpoint, files


def edit_config(directory: Path, **values: Any) -> None:
    """Change values of a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def metadata_only(path: Path, entries: bytes, count: int) -> Path:
    """Write a GGUF file of the architecture "flint" without tensors, with `count` further metadata entries."""
    architecture = gguf_entry("general.architecture", gguf.GGUFValueType.STRING, gguf_text(b"flint"))
    path.write_bytes(gguf_head(0, count + 1, architecture + entries))
    return path


def patch_tensor(path: Path, name: str, edit: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    """Edit the bytes of a GGUF tensor: `edit` gets them as uint8 [rows, row_bytes]."""
    tensor = read_header(DataFile(path)).tensors[name]
    data = np.fromfile(path, np.uint8)
    edit(data[tensor.offset : tensor.offset + tensor.bytes].reshape(-1, tensor.row_bytes))
    data.tofile(path)


def gguf_text(text: bytes) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(text)) + text


def gguf_entry(key: str, kind: gguf.GGUFValueType, value: bytes) -> bytes:
    """A GGUF metadata entry."""
    return gguf_text(key.encode()) + struct.pack("<I", kind) + value


def gguf_tensor(name: str, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    """A GGUF tensor entry; the fastest dimension first."""
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return gguf_text(name.encode()) + shape + struct.pack("<IQ", kind, offset)


def gguf_head(tensors: int, entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    """The start of a GGUF file."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def engine_tensor(engine: Path, file: str, name: str) -> npt.NDArray[Any]:
    """A tensor of an engine's weight file, read with safetensors' own library; BF16 as its bits, uint16."""
    from safetensors import safe_open

    with safe_open(engine / "weights" / f"{file}.safetensors", "pt") as stored:
        tensor = stored.get_tensor(name)
    import torch

    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    result: npt.NDArray[Any] = tensor.numpy()
    return result


def stack_experts(tensors: Arrays, form: str) -> Arrays:
    """The same checkpoint with its experts "stacked" per projection, or "fused" as transformers keeps them."""
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in (2, 3):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: np.stack([tensors[f"{experts}.{e}.{kind}_proj.weight"] for e in range(CONFIG["num_experts"])])
            for kind in ("gate", "up", "down")
        }
        if form == "stacked":
            result |= {f"{experts}.{kind}_proj.weight": value for kind, value in parts.items()}
        else:
            result[f"{experts}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            result[f"{experts}.down_proj"] = parts["down"]
    return result
