"""Repacking a checkpoint into the engine's weight files, as a stream.

Memory does not grow with the model: a worker holds a few chunks of CHUNK_BYTES. Each worker makes one file at a time;
numpy, the hash and the kernel's file calls release Python's lock, so that they keep two cores busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flint_builder.checkpoint import Checkpoint, block_scales
from flint_builder.checkpoint.datafile import UInt8
from flint_builder.checkpoint.tensors import Rows
from flint_builder.safetensors_writer import SafetensorsWriter
from flint_builder.weights import DTYPE_BYTES, Recipe, WeightFile
from flint_plugins import layout, packing
from flint_plugins.ops import DType
from flint_runtime.manifest import FileEntry
from flint_runtime.rope import rope_rows, rope_table

__all__ = ["WEIGHTS_DIRECTORY", "rope_table", "write_weights"]

WEIGHTS_DIRECTORY = "weights"
CHUNK_BYTES = 1 << 20
"""Source bytes of one read and one write: 256 KB cost more CPU time for both."""
_WORKERS = 3
"""One more than the cores meant to be busy: a worker that syncs its file waits for the disk."""

Report = Callable[[int], None]
Array = npt.NDArray[Any]


class _StoppedError(Exception):
    """Another worker failed."""


def write_weights(
    checkpoint: Checkpoint, files: Sequence[WeightFile], directory: Path, progress: Callable[[int], None]
) -> list[FileEntry]:
    """Write the weight files of an engine, each synced to disk.

    Args:
        checkpoint: checked against `files` (`Checkpoint.check`).
        directory: the engine directory; the files go to its weights/, which is created.
        progress: told how many bytes of the checkpoint were read since the last call; calls never overlap, but come
            from worker threads. Their sum is `checkpoint.bytes`.
    Returns:
        one entry per file, in the order of `files`.
    Raises:
        CheckpointError: damage that only reading shows. OSError: writing failed. Files may remain half written.
    """
    (directory / WEIGHTS_DIRECTORY).mkdir(exist_ok=True)
    stop, lock = threading.Event(), threading.Lock()

    def report(count: int) -> None:
        if stop.is_set():
            raise _StoppedError
        with lock:
            progress(count)

    def work(file: WeightFile) -> FileEntry:
        return _write_file(checkpoint, file, directory, report)

    pool = ThreadPoolExecutor(_WORKERS)
    try:
        futures = [pool.submit(work, file) for file in files]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error and not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]


def _write_file(checkpoint: Checkpoint, file: WeightFile, directory: Path, report: Report) -> FileEntry:
    path = f"{WEIGHTS_DIRECTORY}/{file.name}"
    with SafetensorsWriter(directory / path, file.tensors) as writer:
        for recipe in file.recipes:
            for data in _produce(checkpoint, recipe, report):
                writer.write(data)
    return FileEntry(path=path, size=writer.size, blake3=writer.blake3)


def _produce(checkpoint: Checkpoint, recipe: Recipe, report: Report) -> Iterator[Array]:
    """The data of a recipe's outputs, in order; an array is valid until the next one is asked for."""
    match recipe.kind:
        case "copy":
            yield from _copy(checkpoint, recipe, report)
        case "table":
            yield from _table(checkpoint, recipe, report)
        case "pack" | "pack_gate_up":
            yield from _pack(checkpoint, recipe, report)


def _copy(checkpoint: Checkpoint, recipe: Recipe, report: Report) -> Iterator[Array]:
    (source,), (output,) = recipe.sources, recipe.outputs
    for rows in checkpoint.rows(source):
        step = max(1, CHUNK_BYTES // rows.row_bytes)
        for first in range(0, rows.count, step):
            data = rows.read(first, min(step, rows.count - first))
            report(data.nbytes)
            yield _convert(data, rows.tensor.dtype, output.dtype)


def _convert(data: UInt8, stored: str, wanted: DType) -> Array:
    """Bytes of BF16 or F32 values as BF16 (its bits, uint16) or F32.

    Only the embedding is ever narrowed; its values are rounded to BF16 when they are looked up anyway.
    """
    if stored == "BF16":
        bits = data.view(np.uint16)
        return bits if wanted == "bf16" else (bits.astype(np.uint32) << 16).view(np.float32)
    values = data.view(np.float32)
    return round_to_bf16(values) if wanted == "bf16" else values


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to BF16, to nearest even, and return its bits as uint16; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _table(checkpoint: Checkpoint, recipe: Recipe, report: Report) -> Iterator[Array]:
    (output,) = recipe.outputs
    rows, dim = output.shape
    step = max(1, CHUNK_BYTES // (dim * DTYPE_BYTES[output.dtype]))
    for first in range(0, rows, step):
        report(0)
        yield rope_rows(first, min(first + step, rows), dim, checkpoint.config.rope_theta)


def _pack(checkpoint: Checkpoint, recipe: Recipe, report: Report) -> Iterator[Array]:
    stored = [checkpoint.rows(source) for source in recipe.sources]
    together = recipe.kind == "pack_gate_up"
    groups: list[Sequence[Rows]] = []
    for parts in zip(*stored, strict=True):  # the sources of one expert
        groups += [parts] if together else [(part,) for part in parts]
    width, share = groups[0][0].row_bytes, layout.PANEL_ROWS // len(groups[0])
    panels = max(1, min(CHUNK_BYTES // (layout.PANEL_ROWS * width), max(rows.count for rows, *_ in groups) // share))
    # Made once per recipe: fresh memory for every chunk costs as much time as packing it.
    chunks = np.empty((len(groups[0]), panels * share, width), np.uint8)
    packed = np.empty((panels, layout.PANEL_ROWS * width), np.uint8)
    for sharing in groups:
        yield from _pack_panels(checkpoint, sharing, chunks, packed, report)
    if len(recipe.outputs) == 2:
        scales = [checkpoint.scales(source) for source in recipe.sources]
        report(sum(checkpoint.scale_bytes(source) for source in recipe.sources))
        yield np.stack(scales, axis=-1).astype("<f4").reshape(recipe.outputs[1].shape)


def _pack_panels(
    checkpoint: Checkpoint, sharing: Sequence[Rows], chunks: UInt8, packed: UInt8, report: Report
) -> Iterator[Array]:
    """Pack one matrix, or two whose rows share the panels.

    Args:
        chunks, packed: uint8 [matrices, rows, row_bytes] and [panels, 16 * row_bytes], to work in.
    """
    share, (_, step, _) = layout.PANEL_ROWS // len(sharing), chunks.shape
    for first in range(0, sharing[0].count, step):
        count = min(step, sharing[0].count - first)
        parts, out = [chunk[:count] for chunk in chunks], packed[: count // share]
        for rows, part in zip(sharing, parts, strict=True):
            rows.read_into(first, part)
        report(len(parts) * parts[0].nbytes)
        if checkpoint.weights == "bf16":
            packing.pack_bf16([part.view(np.uint16) for part in parts], out.view(np.uint16))
        elif packing.pack_nvfp4(parts, out) > block_scales.LARGEST_SCALE:
            for rows, part in zip(sharing, parts, strict=True):
                checkpoint.normalize(rows, first, part)
            packing.pack_nvfp4(parts, out)
        yield out
