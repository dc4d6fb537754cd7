"""Weights from files to the GPU, which is a fake one (see fake_cuda)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flint_runtime.errors import EngineError
from flint_runtime.executors import cuda, weight_loader
from tests.runtime.fake_cuda import FakeCuda


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Two files of odd sizes, with a tensor larger than a chunk."""
    generator = torch.Generator().manual_seed(1)
    tensors = [
        {
            "a": torch.randint(-128, 127, (3001,), generator=generator).to(torch.int8),
            "b": torch.rand(1),
            "c": torch.rand(3),
        },
        {"d": torch.rand(70_001), "e": torch.rand(5, 7).bfloat16(), "f": torch.arange(9, dtype=torch.int32)},
    ]
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, content in zip(paths, tensors, strict=True):
        save_file(content, path)
    # Clones: what load_file returns are views of the files, which a test cuts off.
    return paths, {name: tensor.clone() for path in paths for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 1 << 20])
def test_every_byte_arrives(
    chunk_bytes: int, files: tuple[list[Path], dict[str, torch.Tensor]], fake: FakeCuda
) -> None:
    paths, expected = files
    layout = weight_loader.plan_weights(paths, chunk_bytes)
    memory = cuda.DeviceMemory(layout.size)
    read: list[int] = []
    weight_loader.upload_weights(layout, memory.address, read.append)
    assert set(layout.offsets) == set(expected)
    for name, tensor in expected.items():
        assert layout.offsets[name] % weight_loader.ALIGNMENT == 0
        assert layout.tensors[name].shape == tuple(tensor.shape)
        found = fake.bytes_at(memory.address + layout.offsets[name], tensor.nbytes)
        assert found.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
    assert sum(read) == sum(tensor.nbytes for tensor in expected.values())
    assert len(layout.chunks) == 2 or chunk_bytes < 1 << 20


def test_damaged_weight_files_are_refused(
    files: tuple[list[Path], dict[str, torch.Tensor]], fake: FakeCuda, tmp_path: Path
) -> None:
    paths, _ = files
    layout = weight_loader.plan_weights(paths)
    memory = cuda.DeviceMemory(layout.size)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-1000])
    with pytest.raises(EngineError, match=r"1\.safetensors is cut off at byte"):
        weight_loader.upload_weights(layout, memory.address)
    with pytest.raises(EngineError, match=r"1\.safetensors cannot be read: .*ends behind the file"):
        weight_loader.plan_weights(paths)
    paths[1].write_bytes(b"\x10" + bytes(7) + b"not json at all!")
    with pytest.raises(EngineError, match=r"1\.safetensors cannot be read"):
        weight_loader.plan_weights(paths)
    with pytest.raises(EngineError, match="is in another weight file, too"):
        weight_loader.plan_weights([paths[0], paths[0]])
    paths[0].unlink()
    with pytest.raises(EngineError, match=r"0\.safetensors cannot be read"):
        weight_loader.upload_weights(layout, memory.address)
