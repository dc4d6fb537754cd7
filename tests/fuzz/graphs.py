"""Damage to ONNX graphs, drawn from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import onnx

from flint_plugins.ops import OPS
from tests.fuzz.mutate import TEXTS

NUMBERS = (-(1 << 63), -1, 0, 1, 2, 3, 16, 64, 127, 128, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1)
"""Those that an ONNX integer holds."""


def mutate_graph(random: Random, model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with one change of a node, an attribute, or an input or output of the graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for _ in range(random.choice((1, 1, 1, 2))):
        random.choice(_GRAPH_CHANGES)(random, copy.graph)
    return copy


def _attribute(random: Random, graph: onnx.GraphProto) -> None:
    node = random.choice(graph.node)
    if not node.attribute:
        return
    attribute = random.choice(node.attribute)
    kind = random.randrange(7)
    if kind == 0:
        node.attribute.remove(attribute)
    elif kind == 1:
        node.attribute.add().CopyFrom(attribute)
    elif kind == 2:
        attribute.name = random.choice((*TEXTS, *(field.name for op in OPS.values() for field in op.fields)))
    elif kind == 3:
        attribute.type = random.randrange(15)
    elif kind == 4:
        attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, random.choice(NUMBERS)))
    elif kind == 5:
        value = random.choice((0.0, -1.0, 1e-6, float("nan"), float("inf"), [1, 2], [0.5], ["a"]))
        attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value))
    else:
        text = random.choice((*TEXTS, "prefill", "decode", "nvfp4"))
        attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, text))


def _node(random: Random, graph: onnx.GraphProto) -> None:
    node = random.choice(graph.node)
    kind = random.randrange(6)
    if kind == 0:
        graph.node.remove(node)
    elif kind == 1:
        graph.node.add().CopyFrom(node)
    elif kind == 2:
        node.op_type = random.choice((*OPS, "Relu", ""))
    elif kind == 3:
        node.domain = random.choice(TEXTS)
    elif kind == 4:
        node.name = random.choice((*TEXTS, *(other.name for other in graph.node)))
    else:
        nodes = list(graph.node)
        random.shuffle(nodes)
        del graph.node[:]
        graph.node.extend(nodes)


def _wire(random: Random, graph: onnx.GraphProto) -> None:
    node = random.choice(graph.node)
    names = random.choice((node.input, node.input, node.output))
    others = [name for other in graph.node for name in (*other.input, *other.output)]
    at = random.randrange(len(names))
    kind = random.randrange(5)
    if kind == 0:
        del names[at]
    elif kind == 1:
        names.append(random.choice((*TEXTS, *others)))
    elif kind == 2:
        other = random.randrange(len(names))
        names[at], names[other] = names[other], names[at]
    else:
        names[at] = random.choice((*others, *others, *TEXTS))


def _tensor(random: Random, graph: onnx.GraphProto) -> None:
    tensors = random.choice((graph.input, graph.output))
    tensor = random.choice(tensors)
    kind, dims = random.randrange(7), tensor.type.tensor_type.shape.dim
    if kind == 0:
        tensors.remove(tensor)
    elif kind == 1:
        tensors.add().CopyFrom(tensor)
    elif kind == 2:
        tensor.name = random.choice((*TEXTS, *(other.name for other in graph.input)))
    elif kind == 3:
        tensor.type.tensor_type.elem_type = random.randrange(20)
    elif kind == 4 and dims:
        random.choice(dims).dim_value = random.choice(NUMBERS)
    elif kind == 5 and dims:
        random.choice(dims).dim_param = random.choice(TEXTS)
    else:
        dims.add().dim_value = random.choice(NUMBERS)


def _extra(random: Random, graph: onnx.GraphProto) -> None:
    name = random.choice(graph.input).name
    kind = random.randrange(3)
    if kind == 0:
        graph.initializer.add().CopyFrom(onnx.helper.make_tensor(name, onnx.TensorProto.INT32, [1], [1]))
    elif kind == 1:
        tensor = graph.initializer.add(name=name, data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="../../outside.bin")
    else:
        graph.input.add(name="x").type.sequence_type.elem_type.tensor_type.elem_type = 1


_GRAPH_CHANGES: tuple[Callable[[Random, onnx.GraphProto], None], ...] = (_attribute, _node, _wire, _tensor, _extra)
