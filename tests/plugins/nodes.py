"""Small ONNX nodes of every op, in every combination of field values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from flint_plugins.ops import DOMAIN, OPS, VERSION, Binding, FieldValue, Op, split_dim

SYMBOLS = {
    "T": 3, "B": 2, "B1": 3, "R": 2, "V": 64, "H": 128, "I": 192, "S": 64, "E": 4, "N": 512, "K": 64,
    "Hq": 4, "Hkv": 2, "D": 64, "C": 32, "P": 5, "G": 7, "L": 2, "W": 48, "Q": 2,
}  # fmt: skip
"""A size for every symbol, with N = (Hq + 2 * Hkv) * D."""
DYNAMIC = ("T", "B", "B1", "R", "P")
"""Symbols that differ from step to step."""
FIELD_VALUES: dict[str, tuple[FieldValue, ...]] = {
    "eps": (1e-6,),
    "has_residual": (0, 1),
    "num_heads": (SYMBOLS["Hq"],),
    "num_kv_heads": (SYMBOLS["Hkv"],),
    "head_dim": (SYMBOLS["D"],),
    "window": (33,),
    "top_k": (2,),
}
ONNX_TYPES = {"bf16": TensorProto.BFLOAT16, "f32": TensorProto.FLOAT, "i32": TensorProto.INT32, "i8": TensorProto.INT8}


def combinations() -> Iterator[tuple[Op, dict[str, FieldValue]]]:
    """Every op with every combination of its fields' values."""
    for op in OPS.values():
        choices = [field.choices or FIELD_VALUES[field.name] for field in op.fields]
        for values in itertools.product(*choices):
            yield op, dict(zip((field.name for field in op.fields), values, strict=True))


def label(op: Op, fields: Mapping[str, FieldValue]) -> str:
    """A test's name."""
    return "-".join([op.name, *(str(v) for k, v in fields.items() if isinstance(v, str) or k == "has_residual")])


def shape(binding: Binding, symbols: Mapping[str, int] = SYMBOLS) -> tuple[int, ...]:
    """The binding's shape for these symbols."""
    sizes = []
    for dim in binding.shape:
        factor, divisor, unknown = split_dim(dim, symbols)
        assert not unknown and factor % divisor == 0, (binding, dim)
        sizes.append(factor // divisor)
    return tuple(sizes)


def onnx_shape(binding: Binding) -> list[int | str]:
    """The binding's shape in a model: dynamic dimensions by name."""
    return [d if d in DYNAMIC else n for d, n in zip(binding.shape, shape(binding), strict=True)]


def model(
    op: Op,
    fields: Mapping[str, FieldValue],
    *,
    dtypes: Mapping[str, str] | None = None,
    shapes: Mapping[str, list[int | str]] | None = None,
    name: str = "node",
) -> bytes:
    """A serialised ONNX model of one node.

    Args:
        op, fields: what the node is.
        dtypes, shapes: instead of the schema's, by binding.
        name: of the node.
    """
    inputs = [
        helper.make_tensor_value_info(
            b.name,
            ONNX_TYPES[(dtypes or {}).get(b.name, b.dtypes[0])],
            (shapes or {}).get(b.name, onnx_shape(b)),
        )
        for b in op.node_inputs(fields)
    ]
    outputs = [helper.make_tensor_value_info(b.name, ONNX_TYPES[b.dtypes[0]], None) for b in op.node_outputs(fields)]
    attributes: dict[str, Any] = {**fields, "plugin_version": VERSION, "plugin_namespace": DOMAIN}
    node = helper.make_node(
        op.name, [x.name for x in inputs], [x.name for x in outputs], name=name, domain=DOMAIN, **attributes
    )
    return serialize([node], inputs, outputs)


def serialize(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> bytes:
    """A model of these nodes."""
    graph = helper.make_graph(nodes, "test", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def profile(
    bindings: list[Binding], greatest: int = 8, **overrides: tuple[tuple[int, ...], ...]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Least, usual and greatest shape of every dynamic input; each dynamic symbol runs from 1 to `greatest`."""
    result = {}
    for binding in bindings:
        if any(dim in DYNAMIC for dim in binding.shape):
            sizes = [dict.fromkeys(DYNAMIC, n) | {"B1": n + 1} for n in (1, math.ceil(greatest / 2), greatest)]
            result[binding.name] = tuple(shape(binding, SYMBOLS | corner) for corner in sizes)
    return result | overrides


def symbols_of(op: Op) -> set[str]:
    """Symbols in an op's inputs and outputs."""
    dims = [dim for binding in (*op.inputs, *op.outputs) for dim in binding.shape]
    return {symbol for dim in dims for symbol in re.findall(r"[A-Za-z]\w*", dim)}
