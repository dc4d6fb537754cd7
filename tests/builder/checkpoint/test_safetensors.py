"""The safetensors reader: headers, shards, and the ways in which experts are stored."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from flint_builder.checkpoint.datafile import DataFile
from flint_builder.checkpoint.safetensors import read_tensors
from flint_builder.weights import Source
from flint_runtime.errors import CheckpointError
from tests.builder.checkpoint import tiny
from tests.builder.checkpoint.tiny import safetensors_bytes

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bf16(tmp_path_factory.mktemp("good"))


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((directory / INDEX).read_text())
    edit(content)
    (directory / INDEX).write_text(json.dumps(content))


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_tensors(DataFile(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_header_agrees_with_safetensors(good: Path) -> None:
    path = good / "model.safetensors"
    tensors = read_tensors(DataFile(path))
    with safe_open(path, "pt") as theirs:
        assert set(theirs.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert list(tensor.shape) == theirs.get_slice(name).get_shape()
            assert tensor.dtype == theirs.get_slice(name).get_dtype()
        embedding = tensors["model.embed_tokens.weight"]
        stored = np.fromfile(path, np.uint16, embedding.bytes // 2, offset=embedding.offset)
        values = stored.view(ml_dtypes.bfloat16).astype(np.float32).reshape(embedding.shape)
        np.testing.assert_array_equal(values, theirs.get_tensor(embedding.name).float().numpy())


def test_sharded_and_whole_are_the_same(good: Path, tmp_path: Path) -> None:
    sharded, files = tiny.opened(tiny.bf16(tmp_path, max_shard_bytes=50_000))
    whole, _ = tiny.opened(good)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert sharded.bytes == whole.bytes
    assert all(tensor.bytes == whole.tensors[name].bytes for name, tensor in sharded.tensors.items())
    assert files


def entry(**values: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | values}


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "c4 length cut": b"\1\0\0",
    "c5 header length": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "c5 header beyond the file": struct.pack("<Q", 100) + b"{}",
    "not JSON": safetensors_bytes(b"{nonsense"),
    "not UTF-8": safetensors_bytes(b'{"\xff": 1}'),
    "not an object": safetensors_bytes([1]),
    "deep": safetensors_bytes(b'{"t":' + b"[" * 100_000),
    "key twice": safetensors_bytes(b'{"t": {}, "t": {}}'),
    "entry": safetensors_bytes({"t": 1}),
    "no dtype": safetensors_bytes({"t": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "dtype": safetensors_bytes(entry(dtype="F4"), bytes(8)),
    "dtype list": safetensors_bytes(entry(dtype=[]), bytes(8)),
    "shape text": safetensors_bytes(entry(shape="2"), bytes(8)),
    "shape float": safetensors_bytes(entry(shape=[2.0]), bytes(8)),
    "shape bool": safetensors_bytes(entry(shape=[True, 2]), bytes(8)),
    "c5 shape negative": safetensors_bytes(entry(shape=[-2, -1]), bytes(8)),
    "c5 shape zero": safetensors_bytes(entry(shape=[0], data_offsets=[0, 0])),
    "c5 shape overflow": safetensors_bytes(entry(shape=[1 << 62, 1 << 62]), bytes(8)),
    "offsets missing": safetensors_bytes({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "offsets of one": safetensors_bytes(entry(data_offsets=[8]), bytes(8)),
    "c5 offsets negative": safetensors_bytes(entry(data_offsets=[-8, 0]), bytes(8)),
    "offsets reversed": safetensors_bytes(entry(data_offsets=[8, 0]), bytes(8)),
    "c5 offsets overflow": safetensors_bytes(entry(data_offsets=[(1 << 64) - 8, 1 << 64]), bytes(8)),
    "size": safetensors_bytes(entry(data_offsets=[0, 4]), bytes(8)),
    "gap": safetensors_bytes(entry(data_offsets=[4, 12]), bytes(12)),
    "overlap": safetensors_bytes(entry() | {"u": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}}, bytes(12)),
    "rest": safetensors_bytes(entry(), bytes(9)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(path)


def test_c4_truncated_tensor_is_named_with_both_sizes(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor = max(read_tensors(DataFile(good / path.name)).values(), key=lambda tensor: tensor.offset)
    path.write_bytes((good / path.name).read_bytes()[: tensor.offset + 6])
    message = refused(path)
    assert tensor.name in message and str(tensor.offset + tensor.bytes) in message and str(tensor.offset + 6) in message


def test_c5_huge_headers_are_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 35))
    with path.open("r+b") as file:
        file.truncate(1 << 36)
    start = time.process_time()
    assert str(1 << 35) in refused(path)
    path.write_bytes(safetensors_bytes(b'{"t":[' + b"[]," * 2_000_000 + b"[]]}"))
    refused(path)
    assert time.process_time() - start < 1


def test_c6_missing_tensors_are_listed(tmp_path: Path) -> None:
    tensors = tiny.weights()
    names = [
        "model.layers.1.self_attn.softmax_offset",
        "model.layers.2.input_layernorm.weight",
        "model.layers.3.mlp.experts.2.up_proj.weight",
    ]
    for name in names:
        del tensors[name]
    with pytest.raises(CheckpointError, match="lacks 3 tensors") as error:
        tiny.opened(tiny.bf16(tmp_path, tensors))
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.experts.4.up_proj.weight"]
)
def test_c6_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    tensors = tiny.weights() | {name: np.zeros((64, 128), np.float32)}
    with pytest.raises(CheckpointError, match=f"1 tensor that Flint does not know: {name}"):
        tiny.opened(tiny.bf16(tmp_path, tensors))


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    tensors = tiny.weights() | {"model.layers.0.mlp.up_proj.weight": np.zeros((128, 192), np.float32)}
    with pytest.raises(CheckpointError, match=r"is BF16 \[128, 192\], expected BF16 \[192, 128\]"):
        tiny.opened(tiny.bf16(tmp_path, tensors))


def test_c9_config_of_another_model(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path)
    tiny.edit_config(directory, vocab_size=800)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is BF16 \[768, 128\], expected .* \[800, 128\]"):
        tiny.opened(directory)


def test_c10_shard_is_missing(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    shard = first_shard(directory)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{INDEX} names the shard {shard.name}, which is not in"):
        tiny.opened(directory)


def test_c10_tensor_is_in_another_shard(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    name, last = "model.layers.2.input_layernorm.weight", max(directory.glob("*.safetensors")).name
    edit_index(directory, lambda index: index["weight_map"].update({name: last}))
    with pytest.raises(CheckpointError, match=rf"{name} is in {last}, but it is in model-000"):
        tiny.opened(directory)


def test_c10_shard_of_another_checkpoint(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    first_shard(directory).write_bytes(safetensors_bytes(entry(), bytes(8)))
    with pytest.raises(CheckpointError, match="no shard has it"):
        tiny.opened(directory)


def test_c10_shard_holds_more_than_the_index_says(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    name = "model.layers.2.input_layernorm.weight"
    edit_index(directory, lambda index: index["weight_map"].pop(name))
    with pytest.raises(CheckpointError, match=rf"holds tensor {name}, which .* does not name"):
        tiny.opened(directory)


def test_c10_total_size(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    edit_index(directory, lambda index: index["metadata"].update(total_size=12345))
    with pytest.raises(CheckpointError, match=r"total_size is 12345 bytes, but its shards hold \d+"):
        tiny.opened(directory)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "", ".."])
def test_c10_shard_outside_the_directory(tmp_path: Path, shard: str) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    edit_index(directory, lambda index: index["weight_map"].update(x=shard))
    with pytest.raises(CheckpointError, match="which is not a file name"):
        tiny.opened(directory)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}'])
def test_index_is_damaged(tmp_path: Path, content: str) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    (directory / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX):
        tiny.opened(directory)


@pytest.mark.parametrize("router", [np.float32, ml_dtypes.bfloat16])
def test_router_keeps_its_type(tmp_path: Path, router: Any) -> None:
    tensors = tiny.weights()
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].astype(router)
    checkpoint, _ = tiny.opened(tiny.bf16(tmp_path, tensors))
    assert checkpoint.router_dtype == ("f32" if router is np.float32 else "bf16")


def test_routers_of_mixed_types_are_read_as_f32(tmp_path: Path) -> None:
    tensors = tiny.weights()
    tensors["model.layers.3.mlp.gate.weight"] = tensors["model.layers.3.mlp.gate.weight"].astype(ml_dtypes.bfloat16)
    checkpoint, _ = tiny.opened(tiny.bf16(tmp_path, tensors))
    assert checkpoint.router_dtype == "f32"


@pytest.mark.parametrize("form", ["stacked", "fused"])
def test_stacked_experts_are_the_same_rows(good: Path, tmp_path: Path, form: str) -> None:
    stacked, _ = tiny.opened(tiny.bf16(tmp_path, tiny.stack_experts(tiny.weights(), form)))
    single, _ = tiny.opened(good)
    for projection, shape in (("gate", (4, 64, 128)), ("up", (4, 64, 128)), ("down", (4, 128, 64))):
        source = Source(tiny.GATE.replace("gate", projection), shape)
        for ours, theirs in zip(stacked.rows(source), single.rows(source), strict=True):
            assert len(ours.tensor.shape) == 3 and ours.count == theirs.count == shape[1]
            np.testing.assert_array_equal(ours.read(0, ours.count), theirs.read(0, theirs.count))


def test_transformers_name_of_the_sinks(tmp_path: Path) -> None:
    tensors = {name.replace("softmax_offset", "sinks"): value for name, value in tiny.weights().items()}
    tiny.opened(tiny.bf16(tmp_path, tensors))
