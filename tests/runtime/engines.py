"""Small engine directories for tests, and plain ways to run prompts through an executor."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from flint_plugins.layout import LAYOUT_VERSION
from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.executors.base import Executor
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.executors.step import Float32, RowSampling, SequencePart, build_step
from flint_runtime.manifest import (
    DIGEST_FIELD,
    FORMAT_VERSION,
    MANIFEST_NAME,
    PHASES,
    Backend,
    FileEntry,
    Limits,
    Manifest,
    Phase,
    WeightFormat,
    encode_manifest,
    manifest_digest,
)


def build_reference_engine(
    checkpoint: Path, directory: Path, limits: Limits, config: Path | None = None, backend: Backend = "plugin-host"
) -> Path:
    """Build an engine with the builder's own graph export and repacking, without plugins.

    With a TensorRT backend it gets plans that tests.runtime.fake_tensorrt reads.
    """
    # Here, because tests on a GPU share the rest of this file, and their machine need not read checkpoints.
    from flint_builder.checkpoint import open_checkpoint
    from flint_builder.graph import export_graph
    from flint_builder.repack import write_weights
    from flint_builder.weights import weight_files

    # A directory may hold both formats.
    wanted: WeightFormat = "nvfp4" if checkpoint.suffix == ".gguf" else "bf16"
    opened = open_checkpoint(str(checkpoint), weights=wanted, hf_config=config)
    files = weight_files(opened.config, opened.weights, opened.router_dtype, limits.max_context)
    opened.check(files)
    for name in ("graph", "plans"):
        (directory / name).mkdir(parents=True)
    written: dict[str, bytes] = dict(opened.assets)
    for phase in PHASES:
        graph = export_graph(opened.config, opened.weights, files, limits, phase)
        written[f"graph/{phase}.onnx"] = graph.model.SerializeToString()
        if backend != "plugin-host":
            written[f"plans/{phase}.plan"] = pickle.dumps((written[f"graph/{phase}.onnx"], graph.profile))
    entries = write_weights(opened, files, directory, lambda count: None)
    for name, data in written.items():
        (directory / name).write_bytes(data)
        entries.append(FileEntry(path=name, size=len(data), blake3=blake3(data).hexdigest()))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        generator="tests",
        model=opened.config,
        weights=opened.weights,
        layout_version=LAYOUT_VERSION,
        targets=("sm120",),
        backend=backend,
        backend_version="",
        plugins_version="",
        limits=limits,
        notes={},
        files=tuple(entries),
    )
    (directory / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return directory


def rewrite_manifest(directory: Path, **changes: object) -> None:
    """Change entries of engine.json, and its digest with them, as a forger could."""
    write_document(directory, json.loads((directory / MANIFEST_NAME).read_text()) | changes)


def write_document(directory: Path, document: Mapping[str, object]) -> None:
    """Write engine.json with the digest of its content."""
    (directory / MANIFEST_NAME).write_bytes(encode_document(document))


def encode_document(document: Mapping[str, object]) -> bytes:
    """The content of engine.json with the digest of what it says."""
    return json.dumps({**document, DIGEST_FIELD: manifest_digest(document)}).encode()


def rewrite_file(directory: Path, name: str, data: bytes) -> None:
    """Replace a file of an engine, and its entry in engine.json with it."""
    (directory / name).write_bytes(data)
    files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
    for entry in files:
        if entry["path"] == name:
            entry |= {"size": len(data), "blake3": blake3(data).hexdigest()}
    rewrite_manifest(directory, files=files)


def poison(executor: ReferenceExecutor) -> None:
    """Fill every KV pool with NaN, so that reading what was never written shows."""
    for name, state in executor.states.items():
        if name.startswith("kv."):
            state.fill_(torch.nan)


def open_poisoned(directory: Path, sequences: int = 1) -> ReferenceExecutor:
    """Open an engine with room for `sequences` sequences of its longest context, all KV NaN."""
    executor = ReferenceExecutor.open(directory)
    pages = -(-executor.limits.max_context // PAGE_TOKENS)
    executor.allocate(pages=sequences * pages + 3, slots=sequences + 1, sample_slots=sequences)
    poison(executor)
    return executor


class Place:
    """One sequence's place in the pools, and how far it has come. Pages are scattered on purpose."""

    def __init__(self, executor: Executor, index: int = 0) -> None:
        pages = -(-executor.limits.max_context // PAGE_TOKENS)
        self.pages = [p + 3 for p in reversed(range(index * pages, (index + 1) * pages))]
        self.ring_slot, self.length = index + 1, 0

    def part(self, token_ids: Sequence[int], rows: Sequence[int]) -> SequencePart:
        """The next tokens, wanting logits of `rows`; the sequence grows."""
        start = self.length
        self.length += len(token_ids)
        used = self.pages[: -(-self.length // PAGE_TOKENS)]
        return SequencePart(token_ids, start, used, self.ring_slot, [(r, RowSampling()) for r in rows])


def run_logits(executor: Executor, phase: Phase, parts: list[SequencePart]) -> Float32:
    """One step; the logits of its rows, [R, V]."""
    result = executor.run(phase, build_step(parts), logits=True)
    assert result.logits is not None
    return result.logits


def feed(executor: Executor, place: Place, token_ids: Sequence[int], chunk: int, phase: Phase = "prefill") -> Float32:
    """Run a prompt in steps of `chunk` tokens and return the logits of every token, [T, V]."""
    steps = []
    for first in range(0, len(token_ids), chunk):
        piece = token_ids[first : first + chunk]
        steps.append(run_logits(executor, phase, [place.part(piece, range(len(piece)))]))
    return np.concatenate(steps)
