"""A full-size engine without a checkpoint, for measurements: the released model's shapes with random weights.

`write_skeleton` needs the builder's libraries (graph export) and no GPU; `complete` adds weight files whose data are
holes in the file; `fill` makes random weights on the GPU. So a machine with a GPU needs only what the skeleton holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from flint_builder.weights import EngineTensor, WeightFile, weight_files
from flint_plugins.layout import LAYOUT_VERSION
from flint_runtime.engine import HASHED_BYTES
from flint_runtime.executors.engine_check import ROPE
from flint_runtime.executors.graph_file import GraphFile, load_graph, parse_graph
from flint_runtime.manifest import (
    FORMAT_VERSION,
    LIBRARY_NAME,
    MANIFEST_NAME,
    PHASES,
    FileEntry,
    Limits,
    Manifest,
    Phase,
    WeightFormat,
    encode_manifest,
)
from flint_runtime.rope import rope_table
from tests.shapes import FLINT

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = Limits(max_batch=64, max_context=262144, prefill_chunk=8192)
ROUTER = "f32"
ENVIRONMENT_VARIABLE = "FLINT_SKELETON"
"""Names a folder that this module wrote elsewhere, for machines without the builder's libraries."""
_SAFETENSORS_TYPES = {"bf16": "BF16", "f32": "F32", "i8": "I8"}


def files(weights: WeightFormat) -> tuple[WeightFile, ...]:
    """The full-size engine's weight files."""
    return weight_files(FLINT, weights, ROUTER, LIMITS.max_context)


def write_skeleton(directory: Path, weights: WeightFormat) -> None:
    """Write the graphs, a few hundred KB."""
    from flint_builder.graph import export_graph

    (directory / "graph").mkdir(parents=True, exist_ok=True)
    for phase in PHASES:
        model = export_graph(FLINT, weights, files(weights), LIMITS, phase).model
        (directory / "graph" / f"{phase}.onnx").write_bytes(model.SerializeToString())


def graph_file(weights: WeightFormat, phase: Phase) -> GraphFile:
    """One of the full-size engine's graphs: from the skeleton that FLINT_SKELETON names, or made on the spot."""
    if skeleton := os.environ.get(ENVIRONMENT_VARIABLE):
        return load_graph(Path(skeleton) / weights / "graph" / f"{phase}.onnx")
    from flint_builder.graph import export_graph

    return parse_graph(export_graph(FLINT, weights, files(weights), LIMITS, phase).model)


def complete(directory: Path, weights: WeightFormat, architecture: str, library: Path, version: str) -> None:
    """Make a skeleton an engine: sparse weight files, the plugin library, the manifest.

    Opening it compares the RoPE table and hashes small files, so these are real; hashes of large files are not.
    """
    (directory / "weights").mkdir(exist_ok=True)
    for file in files(weights):
        _write_sparse(directory / "weights" / file.name, file)
    (directory / LIBRARY_NAME).write_bytes(library.read_bytes())
    entries = [
        FileEntry(path=path.relative_to(directory).as_posix(), size=path.stat().st_size, blake3=_hash(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    ]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        generator="tests.bench.full_size",
        model=FLINT,
        weights=weights,
        layout_version=LAYOUT_VERSION,
        targets=(architecture,),
        backend="plugin-host",
        backend_version="",
        plugins_version=version,
        limits=LIMITS,
        notes={"source": "random weights"},
        files=tuple(entries),
    )
    (directory / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def _hash(path: Path) -> str:
    return blake3(path.read_bytes() if path.stat().st_size <= HASHED_BYTES else b"").hexdigest()


def _write_sparse(path: Path, file: WeightFile) -> None:
    header: dict[str, Any] = {}
    end = 0
    for tensor in file.tensors:
        header[tensor.name] = {
            "dtype": _SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
        for tensor in file.tensors:
            if tensor.name == ROPE:
                out.seek(8 + len(text) + header[ROPE]["data_offsets"][0])
                out.write(rope_table(*tensor.shape, FLINT.rope_theta).tobytes())


def random_values(tensor: EngineTensor, weights: WeightFormat) -> Tensor:
    """Random content for an engine tensor, on the GPU: activations stay of order 1, routing is spread."""
    import torch

    name, shape = tensor.name, tensor.shape
    if name == ROPE:
        return torch.from_numpy(rope_table(shape[0], shape[1], FLINT.rope_theta)).cuda()
    if name.endswith(("norm",)):
        return 1 + 0.1 * torch.randn(shape, device="cuda")
    if name.endswith("sinks"):
        return torch.randn(shape, device="cuda")
    if name.endswith(".router"):
        return torch.randn(shape, device="cuda") / math.sqrt(shape[-1])
    if name.endswith(".scale"):
        return torch.empty(shape, device="cuda").uniform_(0.5, 1.0) * _scale(name)
    if name == "embedding":
        return torch.randn(shape, device="cuda").bfloat16()
    if weights == "bf16":
        columns = shape[-1] // 16
        return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(columns)).bfloat16()
    columns = shape[-1] // 9
    packed = torch.empty(shape, dtype=torch.uint8, device="cuda")
    packed[..., : 8 * columns] = torch.randint(0, 256, (*shape[:-1], 8 * columns), dtype=torch.uint8, device="cuda")
    packed[..., 8 * columns :] = torch.randint(
        0x30, 0x41, (*shape[:-1], columns), dtype=torch.uint8, device="cuda"
    )  # E4M3 0.5 .. 2
    return packed.view(torch.int8)


def _scale(name: str) -> float:
    """Tensor scale that gives a product with unit-variance inputs about unit variance: their RMS is 3.5."""
    columns = FLINT.hidden_size
    if name.endswith("attn.out.scale"):
        columns = FLINT.num_attention_heads * FLINT.head_dim
    elif name.endswith("experts.down.scale"):
        columns = FLINT.moe_intermediate_size
    elif name.endswith("shared.down.scale"):
        columns = FLINT.shared_expert_intermediate_size
    elif name.endswith("mlp.down.scale"):
        columns = FLINT.intermediate_size
    return 1 / (3.5 * math.sqrt(columns))


def device_tensor(address: int, tensor: EngineTensor) -> Tensor:
    """A torch view of device memory."""
    import torch

    typestr = {"bf16": "<i2", "f32": "<f4", "i8": "|i1"}[tensor.dtype]

    class View:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {
                "shape": tensor.shape,
                "typestr": typestr,
                "data": (address, False),
                "version": 3,
            }

    view = torch.as_tensor(View(), device="cuda")
    return view.view(torch.bfloat16) if tensor.dtype == "bf16" else view


def fill(addresses: dict[str, int], weights: WeightFormat) -> None:
    """Fill an engine's weights on the GPU; `addresses` by tensor name."""
    import torch

    torch.manual_seed(0)
    for file in files(weights):
        for tensor in file.tensors:
            device_tensor(addresses[tensor.name], tensor).copy_(random_values(tensor, weights))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    """Write skeletons of both formats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for weights in ("nvfp4", "bf16"):
        write_skeleton(directory / weights, weights)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
