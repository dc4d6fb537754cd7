"""Repacking: what stands in the weight files is what stood in the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from blake3 import blake3
from transformers.models.flint.configuration_flint import FlintConfig
from transformers.models.flint.modeling_flint import FlintRotaryEmbedding

from flint_builder import repack
from flint_builder.checkpoint import Checkpoint
from flint_builder.checkpoint.names import gguf_name, scale_names
from flint_builder.repack import round_to_bf16, write_weights
from flint_builder.weights import Recipe, WeightFile
from flint_plugins import layout
from flint_runtime.errors import CheckpointError
from flint_runtime.manifest import FileEntry
from flint_runtime.rope import inverse_frequencies, rope_table
from tests.builder.checkpoint import tiny
from tests.tools.checkpoints import Quantized

Array = npt.NDArray[Any]


def written(path: Path, engine: Path, **options: Any) -> tuple[Checkpoint, Sequence[WeightFile], list[FileEntry]]:
    """Repack a checkpoint into `engine`."""
    checkpoint, files = tiny.opened(path, **options)
    engine.mkdir()
    counts: list[int] = []
    entries = write_weights(checkpoint, files, engine, counts.append)
    assert sum(counts) == checkpoint.bytes
    return checkpoint, files, entries


def recipes(engine: Path, files: Sequence[WeightFile], *kinds: str) -> list[tuple[Recipe, list[Array]]]:
    """Every recipe of these kinds with what was written for its outputs."""
    return [
        (recipe, [tiny.engine_tensor(engine, file.name.removesuffix(".safetensors"), t.name) for t in recipe.outputs])
        for file in files
        for recipe in file.recipes
        if recipe.kind in kinds
    ]


def joined(recipe: Recipe, parts: list[Array]) -> Array:
    """The rows of a recipe's sources in the order of the engine's tensor."""
    return layout.interleave_gate_up(*parts) if recipe.kind == "pack_gate_up" else np.concatenate(parts, axis=-2)


def gguf_reader(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_nvfp4_blocks_and_scales_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    _, files, _ = written(path, tmp_path / "engine")
    stored = gguf_reader(path)
    checked = recipes(tmp_path / "engine", files, "pack", "pack_gate_up")
    assert len(checked) == 2 * 4 + 2 * 2 + 4 * 2 + 1
    for recipe, (weight, scale) in checked:
        names = [gguf_name(source.name) for source in recipe.sources]
        blocks = joined(recipe, [np.asarray(stored[name].data) for name in names])
        np.testing.assert_array_equal(layout.unpack_nvfp4(weight), blocks, err_msg=str(names))
        scales = [np.asarray(stored[scale_names(name)[0]].data) for name in names]
        expected = np.stack(scales, axis=-1) if len(recipe.sources[0].shape) == 3 else np.concatenate(scales)
        np.testing.assert_array_equal(scale, expected.reshape(recipe.outputs[1].shape), err_msg=str(names))


def test_c2_value_is_gguf_pys_times_the_tensor_scale_once(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    _, files, _ = written(path, tmp_path / "engine")
    stored = gguf_reader(path)
    for recipe, (weight, scale) in recipes(tmp_path / "engine", files, "pack", "pack_gate_up"):
        values = layout.dequantize_blocks(layout.unpack_nvfp4(weight))
        if recipe.kind == "pack_gate_up":
            parts = list(layout.split_gate_up(values))
        else:
            rows = np.cumsum([source.shape[-2] for source in recipe.sources])
            parts = np.split(values, rows[:-1], axis=-2)
        lead = recipe.sources[0].shape[:-2]
        for index, (source, part) in enumerate(zip(recipe.sources, parts, strict=True)):
            tensor = stored[gguf_name(source.name)]
            theirs = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(source.shape)
            tensor_scale = np.asarray(stored[scale_names(tensor.name)[0]].data).reshape(*lead, 1, 1)
            ours = scale.reshape(*lead, len(parts))[..., index, None, None]
            np.testing.assert_array_equal(part * ours, theirs * tensor_scale, err_msg=source.name)


def test_c8_sources_with_different_scales(tmp_path: Path) -> None:
    values = tiny.nvfp4_values()
    for index, name in enumerate(("attn_q", "attn_k", "attn_v")):
        key = f"blk.1.{name}.weight"
        values[key] = Quantized(values[key].blocks, np.array([index + 1.5], np.float32))
    gate = values["blk.3.ffn_gate_exps.weight"]
    values["blk.3.ffn_gate_exps.weight"] = Quantized(gate.blocks, np.array([1, 2, 3, 4], np.float32))
    up = values["blk.3.ffn_up_exps.weight"]
    values["blk.3.ffn_up_exps.weight"] = Quantized(up.blocks, np.array([5, 6, 7, 8], np.float32))
    written(tiny.nvfp4(tmp_path, values), tmp_path / "engine")
    qkv = tiny.engine_tensor(tmp_path / "engine", "layer-01", "layers.1.attn.qkv.scale")
    assert qkv.tolist() == [1.5, 2.5, 3.5]
    experts = tiny.engine_tensor(tmp_path / "engine", "layer-03", "layers.3.mlp.experts.gate_up.scale")
    assert experts.tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]


def test_bf16_comes_back_bit_for_bit(tmp_path: Path) -> None:
    _, files, _ = written(tiny.bf16(tmp_path), tmp_path / "engine")
    tensors = tiny.stack_experts(tiny.weights(), "stacked")
    for recipe, (weight,) in recipes(tmp_path / "engine", files, "pack", "pack_gate_up"):
        rows = joined(recipe, [tensors[source.name].view(np.uint16) for source in recipe.sources])
        np.testing.assert_array_equal(layout.unpack_bf16(weight), rows, err_msg=recipe.outputs[0].name)


@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
def test_copied_tensors(tmp_path: Path, kind: str) -> None:
    path = tiny.nvfp4(tmp_path) if kind == "nvfp4" else tiny.bf16(tmp_path)
    _, files, _ = written(path, tmp_path / "engine")
    tensors = tiny.weights()
    copied = recipes(tmp_path / "engine", files, "copy")
    assert len(copied) == 1 + 4 * 5 + 2 + 1
    for recipe, (value,) in copied:
        (source,), (output,) = recipe.sources, recipe.outputs
        expected = tensors[source.name]
        if kind == "bf16" and not source.name.endswith(("mlp.gate.weight", "softmax_offset")):
            expected = expected.astype(ml_dtypes.bfloat16)
        expected = expected.view(np.uint16) if output.dtype == "bf16" else expected.astype(np.float32)
        np.testing.assert_array_equal(value, expected, err_msg=source.name)


def test_embedding_in_f32_is_rounded_to_bf16(tmp_path: Path) -> None:
    exact = np.random.default_rng(0).standard_normal((768, 128), np.float32)
    tensors = {name: value for name, value in tiny.weights().items() if not name.endswith("embed_tokens.weight")}
    directory = tiny.bf16(tmp_path, tensors | {"model.layers.0.mlp.gate.weight": exact})  # a name stored as F32
    file = directory / "model.safetensors"
    old, new = (f'"model.{name}.weight"'.encode() for name in ("layers.0.mlp.gate", "embed_tokens"))
    file.write_bytes(file.read_bytes().replace(old + b":", new + b":" + b" " * (len(old) - len(new)), 1))
    written(directory, tmp_path / "engine")
    stored = tiny.engine_tensor(tmp_path / "engine", "embedding", "embedding")
    np.testing.assert_array_equal(stored, exact.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_round_to_bf16() -> None:
    bits = np.concatenate(
        [
            np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32),
            np.arange(0, 1 << 32, 0x7FFF).astype(np.uint32),
        ]
    )
    values = bits.view(np.float32)
    nan = np.isnan(values)
    assert np.isnan(round_to_bf16(values[nan]).view(ml_dtypes.bfloat16).astype(np.float32)).all()
    theirs = values[~nan].astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(round_to_bf16(values[~nan]), theirs)


def test_router_in_bf16_stays_bf16(tmp_path: Path) -> None:
    tensors = tiny.weights()
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    written(tiny.bf16(tmp_path, tensors), tmp_path / "engine")
    router = tiny.engine_tensor(tmp_path / "engine", "layer-02", "layers.2.mlp.router")
    np.testing.assert_array_equal(router, tensors["model.layers.2.mlp.gate.weight"].view(np.uint16))


@pytest.mark.parametrize("form", ["stacked", "fused"])
def test_every_way_to_store_experts_gives_the_same_engine(tmp_path: Path, form: str) -> None:
    _, _, single = written(tiny.bf16(tmp_path / "single"), tmp_path / "a")
    stacked = tiny.bf16(tmp_path / form, tiny.stack_experts(tiny.weights(), form))
    _, _, other = written(stacked, tmp_path / "b")
    assert single == other


@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
@pytest.mark.parametrize("chunk", [1, 5000])
def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    path = tiny.nvfp4(tmp_path) if kind == "nvfp4" else tiny.bf16(tmp_path)
    _, _, whole = written(path, tmp_path / "a")
    monkeypatch.setattr(repack, "CHUNK_BYTES", chunk)
    _, _, pieces = written(path, tmp_path / "b")
    assert whole == pieces


def test_entries_describe_the_files(tmp_path: Path) -> None:
    _, files, entries = written(tiny.nvfp4(tmp_path), tmp_path / "engine")
    names = ["embedding", "layer-00", "layer-01", "layer-02", "layer-03", "head"]
    assert [entry.path for entry in entries] == [f"weights/{name}.safetensors" for name in names]
    for file, entry in zip(files, entries, strict=True):
        data = (tmp_path / "engine" / entry.path).read_bytes()
        assert entry.size == len(data)
        assert entry.blake3 == blake3(data).hexdigest()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        assert list(header) == [tensor.name for tensor in file.tensors]
        assert [tuple(h["shape"]) for h in header.values()] == [tensor.shape for tensor in file.tensors]


def test_damage_stops_both_workers(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    for name in ("blk.1.attn_q.weight", "output.weight"):
        tiny.patch_tensor(path, name, lambda rows: rows[3].__setitem__(0, 0x7F))
    checkpoint, files = tiny.opened(path)
    with pytest.raises(CheckpointError, match="0x7F"):
        write_weights(checkpoint, files, tmp_path, lambda count: None)


@pytest.mark.parametrize("chunk", [1, repack.CHUNK_BYTES])
@pytest.mark.parametrize("name", ["ffn_gate_exps", "ffn_up_exps"])
def test_irregular_scales_of_one_of_two_that_share_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    path = tiny.nvfp4(tmp_path)
    _, _, (_, *regular) = written(path, tmp_path / "regular")
    monkeypatch.setattr(repack, "CHUNK_BYTES", chunk)

    def set_bit_7(rows: Array) -> None:  # which ggml ignores
        rows[2 * 64 + 5, 1] |= 0x80
        rows[2 * 64 + 63, layout.GGUF_BLOCK_BYTES + 3] |= 0x80

    tiny.patch_tensor(path, f"blk.3.{name}.weight", set_bit_7)
    checkpoint, _, (_, *lenient) = written(path, tmp_path / "lenient", lenient_scales=True)
    assert checkpoint.lenient_scales == 2
    assert lenient == regular


def test_failure_of_the_progress_display_is_raised(tmp_path: Path) -> None:
    checkpoint, files = tiny.opened(tiny.nvfp4(tmp_path))

    def fail(count: int) -> None:
        raise RuntimeError("display")

    with pytest.raises(RuntimeError, match="display"):
        write_weights(checkpoint, files, tmp_path, fail)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rope_table_is_transformers(theta: float) -> None:
    rows, dim = 4096, 128
    config = FlintConfig(head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    cos, sin = FlintRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(rows)[None])
    theirs = np.concatenate([cos[0, :, : dim // 2].numpy(), sin[0, :, : dim // 2].numpy()], axis=1)
    frequency = (1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))).numpy()
    np.testing.assert_array_max_ulp(inverse_frequencies(dim, theta), frequency, maxulp=2)
    table = rope_table(rows, dim, theta)
    assert table.dtype == np.float32 and table.shape == (rows, dim)
    # The power may be one unit off, so its inverse up to two, which the position multiplies; then one rounding each.
    angle = np.arange(rows)[:, None] * np.tile(frequency, 2).astype(np.float64)
    assert (np.abs(table.astype(np.float64) - theirs) <= angle * 2.0**-22 + 2.0**-23).all()


def test_rope_table_in_the_engine(tmp_path: Path) -> None:
    written(tiny.nvfp4(tmp_path), tmp_path / "engine")
    stored = tiny.engine_tensor(tmp_path / "engine", "embedding", "rope")
    np.testing.assert_array_equal(stored, rope_table(tiny.MAX_CONTEXT, 64, 10000.0))
