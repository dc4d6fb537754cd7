"""Whether the files of an engine are what its manifest says: graphs, weight headers and RoPE table. Needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from flint_plugins.ops import SchemaError
from flint_runtime.engine import CURE, Engine
from flint_runtime.errors import EngineError
from flint_runtime.executors.graph_check import check_graph
from flint_runtime.executors.graph_file import GraphFile, GraphTensor, load_graph
from flint_runtime.executors.weight_file import StoredTensor, read_headers
from flint_runtime.manifest import MANIFEST_NAME, PHASES, Phase
from flint_runtime.memory import MAX_ELEMENTS, MemoryPlan
from flint_runtime.rope import is_rope_row

ROPE = "rope"
"""Name of the tensor that holds the RoPE table."""


def check_contents(engine: Engine) -> None:
    """Compare an engine's graphs and weights with its manifest. Raises EngineError."""
    load_graphs(engine, read_headers(engine.weight_paths()))


def load_graphs(engine: Engine, weights: Mapping[str, StoredTensor]) -> dict[Phase, GraphFile]:
    """Load both graphs of an engine, after they, its weights and its RoPE table were compared with its manifest.

    Args:
        weights: every tensor of the engine's weight files.
    Raises:
        EngineError: a file is damaged or contradicts the manifest or another file.
    """
    plan = MemoryPlan(engine.manifest.model, 0, engine.manifest.limits)
    if min(plan.most_pages, plan.most_slots, plan.most_sample_slots) < 1:
        raise EngineError(
            f"Engine {engine.directory}: one page, ring or row of a state has more than {MAX_ELEMENTS} elements, which "
            "no executor can address. Build the engine again from the original checkpoint."
        )
    tensors = {name: GraphTensor(stored.dtype, stored.shape) for name, stored in weights.items()}
    files: dict[Phase, GraphFile] = {}
    for phase in PHASES:
        path = engine.graph_path(phase)
        files[phase] = load_graph(path)
        try:
            check_graph(files[phase], phase, engine.manifest, tensors)
        except SchemaError as error:
            raise EngineError(
                f"{path} does not fit the engine's manifest and weights: {error!s:.500}. {CURE}"
            ) from None
    if ROPE in weights:
        _check_rope(engine, weights[ROPE])
    return files


def _check_rope(engine: Engine, table: StoredTensor) -> None:
    """Compare the RoPE table's first and last row, and some between, with the model's theta. Raises EngineError.

    The graphs were checked, so the table has the shape [max_context, head_dim].
    """
    rows, dim = table.shape
    theta = engine.manifest.model.rope_theta
    positions = sorted({0, rows - 1, *(1 << bit for bit in range((rows - 1).bit_length()))})
    try:
        with table.path.open("rb") as file:
            found = [os.pread(file.fileno(), dim * 4, table.offset + position * dim * 4) for position in positions]
    except OSError as error:
        raise EngineError(f"{table.path} cannot be read: {error}. {CURE}") from None
    for position, data in zip(positions, found, strict=True):
        if len(data) != dim * 4 or not is_rope_row(np.frombuffer(data, "<f4"), position, theta):
            raise EngineError(
                f"{table.path}: row {position} of the RoPE table is not that of rope_theta {theta!r}, which "
                f"{MANIFEST_NAME} names. {CURE}"
            )
