"""An engine's graph in the plugin host with torch memory, where every tensor between two nodes can be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flint_plugins.ops import OPS
from flint_runtime.config import ModelConfig
from flint_runtime.executors.graph_file import GraphFile, GraphNode
from flint_runtime.executors.host_graph import build_graph, prepare_graph, size_ranges
from flint_runtime.executors.host_library import HostGraph
from flint_runtime.executors.step import STEP_ARRAYS, Step
from flint_runtime.manifest import Limits, Phase
from tests.gpu.ops import TORCH_DTYPES, library


def first_layers(file: GraphFile, layers: int) -> GraphFile:
    """The graph with its first layers only: the head reads the last of them."""
    numbers = {int(node.name.split(".")[1]) for node in file.nodes if node.name.startswith("layers.")}
    gone = tuple(f"{prefix}.{layer}." for prefix in ("layers", "kv") for layer in numbers if layer >= layers)

    def kept(name: str) -> bool:
        return not f"{name}.".startswith(gone)

    last, new_last = (f"layers.{layer}.mlp." for layer in (max(numbers), layers - 1))
    nodes = tuple(
        replace(node, inputs=tuple(name.replace(last, new_last) for name in node.inputs))
        if node.name == "head"
        else node
        for node in file.nodes
        if kept(node.name)
    )
    inputs = {name: given for name, given in file.inputs.items() if kept(name)}
    outputs = {name: given for name, given in file.outputs.items() if kept(name)}
    return GraphFile(inputs, nodes, outputs)


def first_layers_config(config: ModelConfig, layers: int) -> ModelConfig:
    """The configuration that `first_layers` leaves."""
    dense = tuple(layer for layer in config.mlp_only_layers if layer < layers)
    kinds = config.layer_types[:layers]
    return config.model_copy(update={"num_hidden_layers": layers, "layer_types": kinds, "mlp_only_layers": dense})


@dataclass(frozen=True)
class Pool:
    """Sizes of the states."""

    pages: int
    slots: int
    sample_slots: int = 1


def make_states(file: GraphFile, weights: Mapping[str, Tensor], pool: Pool) -> dict[str, Tensor]:
    """What a graph reads besides weights and the step: KV pools full of NaN, all else zeros."""
    sizes = {"pages": pool.pages, "slots": pool.slots, "sample_slots": pool.sample_slots}
    states = {}
    for name, given in file.inputs.items():
        if name in weights or name in STEP_ARRAYS:
            continue
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in given.shape]
        value = torch.nan if name.startswith("kv.") else 0
        states[name] = torch.full(shape, value, dtype=TORCH_DTYPES[given.dtype], device="cuda")
    return states


class GraphRun:
    """One phase's graph, ready to run steps.

    Attributes:
        file: the graph.
        memory: weights and states by graph input name, on the GPU. Steps change the states.
    """

    def __init__(
        self, file: GraphFile, config: ModelConfig, limits: Limits, phase: Phase, memory: Mapping[str, Tensor]
    ):
        self.file, self.memory = file, memory
        self._own = [
            name
            for node in file.nodes
            for name, binding in zip(node.outputs, OPS[node.op].node_outputs(node.fields), strict=True)
            if not binding.alias
        ]
        # Every output gets an address of its own, so that no later node's takes its place in the arena.
        named = replace(file, outputs={name: given for name, given in file.outputs.items() if name not in self._own})
        self._graph: HostGraph = build_graph(library(), named)
        for name in self._own:
            self._graph.mark_output(name)
        prepare_graph(self._graph, file, size_ranges(config, limits, phase))
        self._arena = torch.empty(max(self._graph.arena_bytes, 256), dtype=torch.uint8, device="cuda")

    def run(self, step: Step) -> dict[str, Tensor]:
        """Run a step and wait. Every tensor of the graph by name: weights, states, the step's arrays, all outputs.

        Outputs and workspace start as NaN.
        """
        arrays = {n: torch.tensor(a).cuda() for n, a in step.arrays().items() if n in self.file.inputs}
        tensors = {**self.memory, **arrays}
        shapes = {name: tuple(tensors[name].shape) for name in self.file.inputs}
        self._graph.set_shapes(shapes)
        outputs = {}
        for name in self._own:
            dtype, shape = self._graph.shape(name)
            empty = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cuda")
            outputs[name] = empty.fill_(torch.nan) if empty.is_floating_point() else empty.fill_(-7)
        addresses = {name: tensor.data_ptr() for name, tensor in (tensors | outputs).items()}
        self._arena.fill_(0xFF)
        torch.cuda.synchronize()
        self._graph.bind(shapes, addresses, self._arena.data_ptr()).launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        aliases = {name: tensors[root] for name, root in self.file.aliases().items()}
        return tensors | outputs | aliases


def bindings(node: GraphNode, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A node's inputs and outputs by binding name."""
    op = OPS[node.op]
    inputs = {b.name: tensors[name] for b, name in zip(op.node_inputs(node.fields), node.inputs, strict=True)}
    outputs = {b.name: tensors[name] for b, name in zip(op.node_outputs(node.fields), node.outputs, strict=True)}
    return inputs, outputs
