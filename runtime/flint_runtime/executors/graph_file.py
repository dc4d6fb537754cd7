"""An engine's ONNX graph as plain data: inputs, plugin nodes, outputs. Imports onnx, not torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from flint_plugins.ops import DOMAIN, OPS, DType, FieldValue, SchemaError
from flint_runtime.errors import EngineError

_DTYPES: dict[int, DType] = {
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.FLOAT: "f32",
    onnx.TensorProto.INT32: "i32",
    onnx.TensorProto.INT8: "i8",
}
_PLUGIN_ATTRIBUTES = ("plugin_version", "plugin_namespace")

Dim = int | str
"""A size, or the name of one that varies ("T")."""


@dataclass(frozen=True)
class GraphTensor:
    """Type and shape of a graph's input or output."""

    dtype: DType
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class GraphNode:
    """One plugin node; inputs and outputs by tensor name, in the order of its op's bindings."""

    name: str
    op: str
    fields: dict[str, FieldValue]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class GraphFile:
    """A graph, its nodes in the order in which they run."""

    inputs: dict[str, GraphTensor]
    nodes: tuple[GraphNode, ...]
    outputs: dict[str, GraphTensor]

    def dynamic_shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that vary, for these sizes of the dimensions that have a name."""
        return {
            name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in given.shape)
            for name, given in self.inputs.items()
            if any(isinstance(dim, str) for dim in given.shape)
        }

    def aliases(self) -> dict[str, str]:
        """Outputs that share an input's memory, because a chain of nodes updates it in place."""
        roots: dict[str, str] = {}
        for node in self.nodes:
            op = OPS[node.op]
            sources = {b.name: x for b, x in zip(op.node_inputs(node.fields), node.inputs, strict=True)}
            for binding, name in zip(op.node_outputs(node.fields), node.outputs, strict=True):
                if binding.alias:
                    source = sources[binding.alias]
                    roots[name] = roots.get(source, source)
        return {name: roots[name] for name in self.outputs if roots.get(name) in self.inputs}


def parse_graph(model: onnx.ModelProto) -> GraphFile:
    """The graph of an ONNX model. Raises SchemaError where it is none of plugin nodes only."""
    nodes = []
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in OPS:
            raise SchemaError(f"node {node.name} is {node.domain}.{node.op_type}, which is no plugin of ours")
        fields: dict[str, FieldValue] = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if attribute.name not in _PLUGIN_ATTRIBUTES:
                fields[attribute.name] = value.decode() if isinstance(value, bytes) else value
        try:
            OPS[node.op_type].check_fields(fields)
        except SchemaError as error:
            raise SchemaError(f"node {node.name}: {error}") from None
        nodes.append(GraphNode(node.name, node.op_type, fields, tuple(node.input), tuple(node.output)))
    return GraphFile(_tensors(model.graph.input), tuple(nodes), _tensors(model.graph.output))


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> dict[str, GraphTensor]:
    found = {}
    for value in values:
        tensor = value.type.tensor_type
        if tensor.elem_type not in _DTYPES:
            raise SchemaError(f"tensor {value.name} has ONNX type {tensor.elem_type}")
        shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        found[value.name] = GraphTensor(_DTYPES[tensor.elem_type], shape)
    return found


def load_graph(path: Path) -> GraphFile:
    """Read an ONNX file. Raises EngineError where it is damaged or holds anything but plugin nodes."""
    try:
        return parse_graph(onnx.load(path))
    except Exception as error:  # protobuf and onnx raise types of their own
        raise EngineError(f"{path} cannot be read: {error}. Copy the engine again or rebuild it.") from None
