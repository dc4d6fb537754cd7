"""An engine's ONNX graph as plain data: inputs, plugin nodes, outputs. Imports onnx, not torch."""

from __future__ import annotations

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
class GraphInput:
    """Type and shape of one graph input."""

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

    inputs: dict[str, GraphInput]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[str, ...]


def parse_graph(model: onnx.ModelProto) -> GraphFile:
    """The graph of an ONNX model. Raises SchemaError where it is none of plugin nodes only."""
    inputs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if tensor.elem_type not in _DTYPES:
            raise SchemaError(f"input {value.name} has ONNX type {tensor.elem_type}")
        shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        inputs[value.name] = GraphInput(_DTYPES[tensor.elem_type], shape)
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
    return GraphFile(inputs, tuple(nodes), tuple(value.name for value in model.graph.output))


def load_graph(path: Path) -> GraphFile:
    """Read an ONNX file. Raises EngineError where it is damaged or holds anything but plugin nodes."""
    try:
        return parse_graph(onnx.load(path))
    except Exception as error:  # protobuf and onnx raise types of their own
        raise EngineError(f"{path} cannot be read: {error}. Copy the engine again or rebuild it.") from None
