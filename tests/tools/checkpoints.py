"""Write Flint checkpoints: BF16 Hugging Face directories and NVFP4 GGUF files, from given or random weights.

    python -m tests.tools.checkpoints --layers 6 --experts 16 --format nvfp4 --out /somewhere/flint-random

Everything can be streamed one tensor at a time, so a full-size random checkpoint needs the memory of one tensor.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.tools import nvfp4
from tests.tools.flint_layout import (
    Config,
    Dtype,
    TensorSpec,
    flint_config,
    gguf_specs,
    gguf_to_hf,
    hf_dtype,
    hf_specs,
    scale_name,
)
from tests.tools.nano_data import NANO_DIR

__all__ = [
    "Quantized",
    "RandomWeights",
    "TensorSpec",
    "flint_config",
    "gguf_specs",
    "gguf_to_hf",
    "hf_dtype",
    "hf_specs",
    "quantize_checkpoint",
    "random_checkpoint",
    "read_gguf",
    "scale_name",
    "write_gguf",
    "write_hf",
]

Array = NDArray[Any]

GGML = gguf.GGMLQuantizationType
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Quantized:
    """An NVFP4 tensor: blocks [..., N, K // 64 * 36] u8 and its tensor scale, [1] or [E] f32."""

    blocks: Array
    scale: Array


Value = Array | Quantized
Source = Value | Callable[[], Value]


# ---------------------------------------------------------------------------------------------------- BF16 directory


def write_hf(
    directory: Path,
    config: Config,
    tensors: Mapping[str, Array] | Iterable[tuple[str, Array]],
    max_shard_bytes: int | None = None,
    tokenizer_from: Path | None = None,
) -> None:
    """Write config files and the BF16 weights of a checkpoint directory.

    Args:
        tensors: f32 arrays (rounded to the stored type), or bfloat16 ones. A mapping defines by itself what is
            written, so it can also be incomplete or have foreign names; its bfloat16 arrays stay BF16 under every
            name. An iterable of pairs is streamed: it must yield, in any order, exactly the tensors of `hf_specs`.
        max_shard_bytes: split into shards with an index; by default one model.safetensors.
        tokenizer_from: a directory whose tokenizer files are copied.

    Raises:
        ValueError: the stream does not match `hf_specs(config)`.
    """
    write_side_files(directory, config, tokenizer_from)
    if isinstance(tensors, Mapping):
        specs = [
            TensorSpec(name, value.shape, "BF16" if value.dtype == ml_dtypes.bfloat16 else hf_dtype(name))
            for name, value in tensors.items()
        ]
        stream: Iterable[tuple[str, Array]] = tensors.items()
    else:
        specs, stream = hf_specs(config), tensors
    with _SafetensorsWriter(directory, specs, max_shard_bytes) as writer:
        for name, value in stream:
            writer.write(name, value)


class _SafetensorsWriter:
    """Safetensors shards whose headers are written first and whose tensors arrive in any order."""

    def __init__(self, directory: Path, specs: list[TensorSpec], max_shard_bytes: int | None) -> None:
        shards: list[list[TensorSpec]] = [[]]
        size = 0
        for spec in specs:
            if max_shard_bytes and shards[-1] and size + spec.nbytes > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(spec)
            size += spec.nbytes
        count = len(shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if max_shard_bytes is None:
            names = ["model.safetensors"]
        self._files: list[BinaryIO] = []
        self._places: dict[str, tuple[BinaryIO, int, TensorSpec]] = {}
        for name, shard in zip(names, shards, strict=True):
            file = (directory / name).open("wb")
            self._files.append(file)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            for spec in shard:
                end = offset + spec.nbytes
                header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
                offset = end
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)
            for spec in shard:
                self._places[spec.name] = (file, 8 + len(text) + header[spec.name]["data_offsets"][0], spec)
        if max_shard_bytes is not None:
            weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
            index = {"metadata": {"total_size": sum(s.nbytes for s in specs)}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, value: Array) -> None:
        if name not in self._places:
            raise ValueError(f"unexpected or repeated tensor {name}")
        file, offset, spec = self._places.pop(name)
        if value.shape != spec.shape:
            raise ValueError(f"{name}: shape {value.shape}, expected {spec.shape}")
        file.seek(offset)
        stored(value, spec.dtype).tofile(file)

    def __enter__(self) -> _SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files:
            file.close()
        if kind is None and self._places:
            raise ValueError(f"{len(self._places)} tensors were never written, first {next(iter(self._places))}")


def stored(value: Array, dtype: Dtype) -> Array:
    """The array in its stored type: bfloat16 (rounded to nearest even) or float32, contiguous."""
    target: Any = ml_dtypes.bfloat16 if dtype == "BF16" else np.float32
    result: Array = np.ascontiguousarray(value).astype(target, copy=False)
    return result


def write_side_files(directory: Path, config: Config, tokenizer_from: Path | None = None) -> None:
    """config.json, generation_config.json and, if given a source, tokenizer and chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    generation |= {key: config[key] for key in ("pad_token_id", "eos_token_id") if config.get(key) is not None}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer_from and tokenizer_from.resolve() != directory.resolve():
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_from / name, directory / name)


# -------------------------------------------------------------------------------------------------------- NVFP4 GGUF


def write_gguf(
    path: Path,
    config: Config,
    tensors: Mapping[str, Source],
    *,
    omit: Collection[str] = (),
    extra: Mapping[str, Array] | None = None,
    metadata: Mapping[str, int | float | str | bool] | None = None,
) -> None:
    """Write an NVFP4 GGUF with the names and types of `gguf_specs`.

    Args:
        tensors: by GGUF name: `Quantized` for NVFP4 tensors, f32 otherwise, or a callable that makes it when its
            turn comes, so that one tensor is in memory at a time. An f32 array in the place of an NVFP4 tensor is
            stored as F32.
        omit: weights or `.scale` tensors to leave out, for damaged files in tests.
        extra: further F32 tensors at the end.
        metadata: further keys, or other values for the usual ones.

    Raises:
        KeyError: a tensor of `gguf_specs(config)` is missing.
        ValueError: a shape differs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "flint")
    _add_metadata(writer, config, metadata or {})
    specs = [spec for spec in gguf_specs(config) if spec.name not in omit]
    for spec in specs:
        source = tensors[spec.name]
        if spec.dtype == "NVFP4" and not isinstance(source, np.ndarray):
            row_bytes = spec.shape[-1] // nvfp4.SUPER_VALUES * nvfp4.SUPER_BYTES
            shape = (*spec.shape[:-1], row_bytes)
            writer.add_tensor_info(spec.name, shape, np.dtype(np.uint8), spec.nbytes, raw_dtype=GGML.NVFP4)
            if scale_name(spec.name) not in omit:
                shape = spec.shape[:1] if len(spec.shape) == 3 else (1,)
                writer.add_tensor_info(scale_name(spec.name), shape, np.dtype(np.float32), 4 * shape[0])
        elif spec.dtype == "BF16":
            writer.add_tensor_info(spec.name, spec.shape, np.dtype(np.uint16), spec.nbytes, raw_dtype=GGML.BF16)
        else:
            values = int(np.prod(spec.shape))
            writer.add_tensor_info(spec.name, spec.shape, np.dtype(np.float32), 4 * values)
    for name, array in (extra or {}).items():
        writer.add_tensor_info(name, array.shape, np.dtype(np.float32), 4 * array.size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for spec in specs:
        source = tensors[spec.name]
        value = source() if callable(source) else source
        if isinstance(value, Quantized):
            if value.blocks.nbytes != spec.nbytes or value.blocks.shape[:-1] != spec.shape[:-1]:
                raise ValueError(f"{spec.name}: blocks {value.blocks.shape} do not hold {spec.shape}")
            writer.write_tensor_data(np.ascontiguousarray(value.blocks))
            if scale_name(spec.name) not in omit:
                writer.write_tensor_data(np.ascontiguousarray(value.scale, dtype=np.float32).reshape(-1))
            continue
        if value.shape != spec.shape:
            raise ValueError(f"{spec.name}: shape {value.shape}, expected {spec.shape}")
        writer.write_tensor_data(stored(value, "F32" if spec.dtype == "NVFP4" else spec.dtype))
    for array in (extra or {}).values():
        writer.write_tensor_data(stored(array, "F32"))
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: Config, extra: Mapping[str, int | float | str | bool]) -> None:
    values: dict[str, int | float | str | bool] = {
        "general.name": "flint",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_NVFP4),
        "general.quantization_version": 2,
        "flint.block_count": config["num_hidden_layers"],
        "flint.context_length": config["max_position_embeddings"],
        "flint.vocab_size": config["vocab_size"],
        "flint.embedding_length": config["hidden_size"],
        "flint.feed_forward_length": config["intermediate_size"],
        "flint.leading_dense_block_count": len(config["mlp_only_layers"]),
        "flint.attention.head_count": config["num_attention_heads"],
        "flint.attention.head_count_kv": config["num_key_value_heads"],
        "flint.attention.key_length": config["head_dim"],
        "flint.attention.value_length": config["head_dim"],
        "flint.attention.sliding_window": config["sliding_window"],
        "flint.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "flint.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "flint.rope.dimension_count": config["head_dim"],
        "flint.expert_count": config["num_experts"],
        "flint.expert_used_count": config["num_experts_per_tok"],
        "flint.expert_shared_count": 1,
        "flint.expert_feed_forward_length": config["moe_intermediate_size"],
        "flint.expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "flint.expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "flint.expert_weights_norm": bool(config["norm_topk_prob"]),
    }
    for key, value in (values | dict(extra)).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)


def quantize_checkpoint(config: Config, tensors: Mapping[str, Array]) -> dict[str, Value]:
    """Quantise Hugging Face weights for `write_gguf`.

    q, k and v of a layer share one tensor scale, and so do gate and up (of each expert).

    Args:
        tensors: f32 by the names of `hf_specs`; pass values already rounded to BF16 to quantise the BF16 checkpoint.
    """
    result: dict[str, Value] = {}
    for spec in gguf_specs(config):
        name = gguf_to_hf(spec.name)
        if spec.name in result:
            continue
        if spec.dtype != "NVFP4":
            result[spec.name] = tensors[name]
            continue
        group = [spec.name]
        if ".attn_q." in spec.name:
            group = [spec.name.replace("attn_q", f"attn_{x}") for x in "qkv"]
        elif ".ffn_gate" in spec.name:
            group = [spec.name, spec.name.replace("ffn_gate", "ffn_up")]
        if "{}" in name:
            stacks = [
                np.stack([tensors[gguf_to_hf(member).format(e)] for e in range(spec.shape[0])]) for member in group
            ]
            blocks, scales = nvfp4.quantize_experts(*stacks)
        else:
            blocks, scale = nvfp4.quantize_shared([tensors[gguf_to_hf(member)] for member in group])
            scales = np.array([scale], dtype=np.float32)
        for member, part in zip(group, blocks, strict=True):
            result[member] = Quantized(part, scales)
    return result


def read_gguf(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Dequantised weights of an NVFP4 GGUF under Hugging Face names, f32, one tensor at a time."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if tensor.tensor_type == GGML.NVFP4:
            scale = tensors[scale_name(name)].data if scale_name(name) in tensors else np.float32(1.0)
            values = nvfp4.dequantize(np.asarray(tensor.data), scale)
        elif tensor.tensor_type == GGML.BF16:
            values = np.asarray(tensor.data).view(ml_dtypes.bfloat16).astype(np.float32).reshape(shape)
        else:
            values = np.asarray(tensor.data, dtype=np.float32)
        if "_exps." in name:
            for expert, value in enumerate(values):
                yield gguf_to_hf(name).format(expert), value
        else:
            yield gguf_to_hf(name), values


# ---------------------------------------------------------------------------------------------------- random weights

_POOL_VALUES = 1 << 22
_SCALE_BYTES = (0x68, 16)  # random block scales: E4M3 64 to 240


class RandomWeights:
    """Random tensors of sane size, each a function of seed and name only.

    Matrices have std 1 / sqrt(K), the embedding 1, routers 1.5 / sqrt(K), norms are 1 +- 0.1, sinks N(0, 1). BF16
    matrices are cut at random places from one pool of normal values, which is much faster than drawing them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._normal = np.random.default_rng([seed, 0]).standard_normal(_POOL_VALUES, dtype=np.float32)
        self._pools: dict[float, Array] = {}

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode()), len(name)])

    def plain(self, name: str, shape: tuple[int, ...]) -> Array:
        """A tensor under its Hugging Face name: f32 vectors and routers, bfloat16 matrices."""
        generator = self._generator(name)
        if len(shape) == 1 or name.endswith("mlp.gate.weight"):
            values: NDArray[np.float32] = generator.standard_normal(shape, dtype=np.float32)
            if name.endswith("norm.weight"):
                values = 1 + np.float32(0.1) * values
            elif len(shape) == 2:
                values *= np.float32(1.5 * shape[-1] ** -0.5)
            return values
        std = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        if std not in self._pools:
            self._pools[std] = (self._normal * np.float32(std)).astype(ml_dtypes.bfloat16)
        pool = self._pools[std]
        out = np.empty(int(np.prod(shape)), dtype=ml_dtypes.bfloat16)
        filled = 0
        while filled < out.size:
            start = int(generator.integers(pool.size // 2))
            part = pool[start : start + out.size - filled]
            out[filled : filled + part.size] = part
            filled += part.size
        result: Array = out.reshape(shape)
        return result

    def quantized(self, name: str, shape: tuple[int, ...]) -> Quantized:
        """An NVFP4 tensor under its GGUF name: uniform codes, block scales 64 to 240.

        q, k, v and gate, up get the same tensor scale; experts get one each.
        """
        generator = self._generator(name)
        row_bytes = shape[-1] // nvfp4.SUPER_VALUES * nvfp4.SUPER_BYTES
        count = int(np.prod(shape[:-1])) * row_bytes
        blocks = np.frombuffer(generator.bytes(count), dtype=np.uint8).copy().reshape(-1, nvfp4.SUPER_BYTES)
        low, span = _SCALE_BYTES
        blocks[:, :4] = blocks[:, :4] % np.uint8(span) + np.uint8(low)
        code_rms = np.sqrt(np.mean(np.square(nvfp4.E2M1_VALUES)))
        scale_rms = np.sqrt(np.mean(np.square(nvfp4.E4M3_VALUES[low : low + span])))
        group = name
        for member in ("attn_k.", "attn_v."):
            group = group.replace(member, "attn_q.")
        factors = self._generator(group.replace("ffn_up", "ffn_gate") + " scale").uniform(
            0.8, 1.2, shape[0] if len(shape) == 3 else 1
        )
        scale = (factors / (np.sqrt(shape[-1]) * code_rms * scale_rms)).astype(np.float32)
        return Quantized(blocks.reshape(*shape[:-1], row_bytes), scale)


def random_checkpoint(
    path: Path,
    config: Config,
    format: Literal["bf16", "nvfp4"] = "bf16",
    seed: int = 0,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write a random checkpoint with flint-nano's tokenizer, tensor by tensor.

    Args:
        path: the directory; for nvfp4 also a path that ends with .gguf, whose directory then gets the config files.

    Returns:
        the directory (bf16) or the GGUF file (nvfp4), which has config and tokenizer files beside it.
    """
    weights = RandomWeights(seed)
    nano_vocabulary = len(json.loads((NANO_DIR / "tokenizer.json").read_text())["model"]["vocab"])
    tokenizer_from = NANO_DIR if config["vocab_size"] > nano_vocabulary else None
    if format == "bf16":
        stream = ((spec.name, weights.plain(spec.name, spec.shape)) for spec in hf_specs(config))
        write_hf(path, config, stream, max_shard_bytes, tokenizer_from)
        return path
    target = path if path.suffix == ".gguf" else path / f"{path.name}-nvfp4.gguf"
    write_side_files(target.parent, config, tokenizer_from)

    def source(spec: TensorSpec) -> Callable[[], Value]:
        if spec.dtype == "NVFP4":
            return lambda: weights.quantized(spec.name, spec.shape)
        return lambda: weights.plain(gguf_to_hf(spec.name), spec.shape)

    write_gguf(target, config, {spec.name: source(spec) for spec in gguf_specs(config)})
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a random Flint checkpoint; every size defaults to the released model's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = flint_config.__kwdefaults__ or {}
    for option, default in defaults.items():
        parser.add_argument("--" + option.replace("_", "-"), type=int, default=default)
    parser.add_argument("--format", choices=("bf16", "nvfp4"), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-shard-bytes", type=int, default=None, help="split the BF16 weights into shards")
    parser.add_argument("--out", type=Path, required=True, help="directory, or for nvfp4 a .gguf path")
    args = parser.parse_args()
    config = flint_config(**{option: getattr(args, option) for option in defaults})
    print(random_checkpoint(args.out, config, args.format, args.seed, args.max_shard_bytes))


if __name__ == "__main__":
    main()
