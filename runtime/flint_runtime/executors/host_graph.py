"""A graph file in the plugin host, configured for everything that a phase may be asked."""

from __future__ import annotations

from collections.abc import Mapping

from flint_runtime.config import ModelConfig
from flint_runtime.executors.graph_file import GraphFile
from flint_runtime.executors.host_library import DYNAMIC, HostGraph, HostLibrary
from flint_runtime.executors.staging import page_table_columns
from flint_runtime.manifest import Limits, Phase
from flint_runtime.memory import MemoryPlan

ARENA_OUTPUTS = frozenset({"logits"})
"""Graph outputs that stay in the arena: large, and rarely asked for."""


def size_ranges(config: ModelConfig, limits: Limits, phase: Phase) -> dict[str, tuple[int, int, int]]:
    """Least, usual and greatest value of every size that varies, by its name in the graph file."""
    plan = MemoryPlan(config, 0, limits)
    batch, columns = limits.max_batch, page_table_columns(limits)
    prefill = phase == "prefill"
    tokens = limits.prefill_chunk if prefill else limits.decode_tokens
    rows = limits.logits_rows if prefill else tokens
    return {
        "T": (1, tokens if prefill else 1, tokens),
        "B": (1, 1, batch),
        "B+1": (2, 2, batch + 1),
        "P": (1, columns, columns),
        "R": (1, 1, rows),
        "pages": (1, max(1, min(columns, plan.most_pages)), plan.most_pages),
        "slots": (1, batch, plan.most_slots),
        "sample_slots": (1, batch, plan.most_sample_slots),
    }


def build_graph(library: HostLibrary, file: GraphFile) -> HostGraph:
    """The graph with its plugins, not prepared yet. Raises HostError where a plugin refuses its node."""
    graph = HostGraph(library)
    for name, given in file.inputs.items():
        graph.add_input(name, given.dtype, [DYNAMIC if isinstance(dim, str) else dim for dim in given.shape])
    for node in file.nodes:
        graph.add_node(node.op, node.name, node.fields, node.inputs, node.outputs)
    for name in file.outputs:
        graph.mark_output(name, in_arena=name in ARENA_OUTPUTS)
    return graph


def prepare_graph(graph: HostGraph, file: GraphFile, ranges: Mapping[str, tuple[int, int, int]]) -> None:
    """Configure the plugins for `size_ranges` and plan the arena. Raises HostError."""
    least, usual, most = (file.dynamic_shapes({name: sizes[i] for name, sizes in ranges.items()}) for i in range(3))
    graph.prepare(most, least, usual)
