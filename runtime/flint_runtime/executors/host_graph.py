"""A graph file in the plugin host, configured for everything that a phase may be asked."""

from __future__ import annotations

from collections.abc import Mapping

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.config import ModelConfig
from flint_runtime.executors.graph_file import GraphFile
from flint_runtime.executors.host_library import DYNAMIC, HostGraph, HostLibrary
from flint_runtime.executors.staging import page_table_columns
from flint_runtime.manifest import Limits, Phase, ring_tokens

ARENA_OUTPUTS = frozenset({"logits"})
"""Graph outputs that stay in the arena: large, and rarely asked for."""

_MAX_ELEMENTS = 2**31 - 1
"""Of one tensor: TensorRT counts them in 32 bits, and the kernels may, too."""


def size_ranges(config: ModelConfig, limits: Limits, phase: Phase) -> dict[str, tuple[int, int, int]]:
    """Least, usual and greatest value of every size that varies, by its name in the graph file."""
    page = config.num_key_value_heads * 2 * PAGE_TOKENS * config.head_dim
    slot = config.num_key_value_heads * 2 * ring_tokens(config.sliding_window) * config.head_dim
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
        "pages": (1, max(1, min(columns, _MAX_ELEMENTS // page)), _MAX_ELEMENTS // page),
        "slots": (1, batch, _MAX_ELEMENTS // slot),
        "sample_slots": (1, batch, _MAX_ELEMENTS // config.vocab_size),
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
