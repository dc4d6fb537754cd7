"""An engine's ONNX graph as plain data: inputs, plugin nodes, outputs. Imports onnx, not torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from flint_plugins.ops import DOMAIN, OPS, VERSION, DType, FieldValue, SchemaError
from flint_runtime.engine import CURE
from flint_runtime.errors import EngineError

_DTYPES: dict[int, DType] = {
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.FLOAT: "f32",
    onnx.TensorProto.INT32: "i32",
    onnx.TensorProto.INT8: "i8",
}
_PLUGIN_ATTRIBUTES = {"plugin_version": VERSION, "plugin_namespace": DOMAIN}
_NAME = re.compile(r"[!-~]{1,200}")
_MAX_BYTES = 64 << 20

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
    """The graph of an ONNX model. Raises SchemaError where it is anything but plugin nodes over named tensors."""
    graph = model.graph
    for name, parts in (
        ("functions", model.functions),
        ("training_info", model.training_info),
        ("initializer", graph.initializer),
        ("sparse_initializer", graph.sparse_initializer),
    ):
        if parts:
            raise SchemaError(f"it has {name}; a graph of ours has none")
    return GraphFile(_tensors(graph.input), tuple(map(_node, graph.node)), _tensors(graph.output))


def _node(node: onnx.NodeProto) -> GraphNode:
    name = _name(node.name)
    if node.domain != DOMAIN or node.op_type not in OPS:
        raise SchemaError(f"node {name} is {node.domain!r:.80}.{node.op_type!r:.80}, which is no plugin of ours")
    try:
        fields: dict[str, FieldValue] = {}
        for attribute in node.attribute:
            if attribute.name in fields:
                raise SchemaError(f"field {attribute.name!r:.80} comes twice")
            fields[attribute.name] = _field_value(attribute)
        for given, wanted in _PLUGIN_ATTRIBUTES.items():
            if (found := fields.pop(given, None)) != wanted:
                raise SchemaError(f"{given} must be {wanted!r}, found {found!r:.80}")
        OPS[node.op_type].check_fields(fields)
        inputs, outputs = (tuple(map(_name, names)) for names in (node.input, node.output))
    except SchemaError as error:
        raise SchemaError(f"node {name}: {error}") from None
    return GraphNode(name, node.op_type, fields, inputs, outputs)


def _field_value(attribute: onnx.AttributeProto) -> FieldValue:
    if attribute.type == onnx.AttributeProto.INT:
        return int(attribute.i)
    if attribute.type == onnx.AttributeProto.FLOAT:
        return float(attribute.f)
    if attribute.type == onnx.AttributeProto.STRING:
        return bytes(attribute.s).decode("ascii", "replace")
    raise SchemaError(f"field {attribute.name!r:.80} has ONNX attribute type {attribute.type}")


def _name(name: object) -> str:
    """A name that logs, messages and C strings take as it is; protobuf hands out bytes for what is no UTF-8."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SchemaError(f"{name!r:.80} is no name of a node or tensor")
    return name


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> dict[str, GraphTensor]:
    found: dict[str, GraphTensor] = {}
    for value in values:
        name, tensor = _name(value.name), value.type.tensor_type
        if name in found:
            raise SchemaError(f"tensor {name} comes twice")
        if tensor.elem_type not in _DTYPES:
            raise SchemaError(f"tensor {name} has ONNX type {tensor.elem_type}")
        shape = tuple(_name(dim.dim_param) if dim.dim_param else int(dim.dim_value) for dim in tensor.shape.dim)
        found[name] = GraphTensor(_DTYPES[tensor.elem_type], shape)
    return found


def load_graph(path: Path) -> GraphFile:
    """Read an ONNX file. Raises EngineError where it is damaged or holds anything but plugin nodes."""
    try:
        return parse_graph(_load_model(path))
    except (OSError, SchemaError) as error:
        raise EngineError(f"{path} cannot be read: {error!s:.500}. {CURE}") from None


def _load_model(path: Path) -> onnx.ModelProto:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise SchemaError(f"it is longer than {_MAX_BYTES >> 20} MiB")
    try:
        return onnx.load_model_from_string(data)  # Unlike onnx.load, it follows no reference to another file.
    except Exception as error:  # protobuf raises types of its own
        raise SchemaError(str(error)) from None
