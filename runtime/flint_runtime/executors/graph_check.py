"""Whether a graph is one of the engine's model: checked once, at opening, so that no executor is surprised.

Inputs must be what steps, states and weight files feed, to the name, type and shape. Every node must be what its op's
schema says (the plugins check that again), with the model's sizes and settings, layer by layer. What a node updates in
place must be a state, and nobody may read what it was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flint_plugins.ops import OPS, PAGE_TOKENS, DType, FieldValue, SchemaError
from flint_runtime.config import ModelConfig
from flint_runtime.executors.graph_file import Dim, GraphFile, GraphNode, GraphTensor
from flint_runtime.executors.staging import RESULT_ARRAYS, ArrayTypes
from flint_runtime.executors.step import STEP_ARRAYS, sampling_states
from flint_runtime.manifest import Manifest, Phase, ring_tokens

_SIZES = {name: (1 << 40) + 1000 * i for i, name in enumerate(("T", "B", "P", "R", "pages", "slots", "sample_slots"))}
_SIZES["B+1"] = _SIZES["B"] + 1
"""A size for every dimension that varies, unlike each other and any real one: with them the schemas can be solved."""
_SYMBOLS = {"T": "T", "B": "B", "B1": "B+1", "P": "P", "R": "R", "G": "pages", "L": "slots", "Q": "sample_slots"}
"""Symbols of the op schemas that stand for such a dimension."""

_MEANINGS = {"C": "the number of rows of the RoPE table", "W": "the length of a ring", "V": "the vocabulary"}

_LAYER_STARTS = ("NormQkvRope", "NormQkvAttention")
_MLPS = ("NormMlp", "NormMoe")
_DTYPES: dict[type, DType] = {np.int32: "i32", np.float32: "f32"}


def check_graph(file: GraphFile, phase: Phase, manifest: Manifest, weights: Mapping[str, GraphTensor]) -> None:
    """Check a phase's graph against the manifest and the tensors of the weight files.

    Raises:
        SchemaError: naming the node or tensor, what was expected and what was found.
    """
    try:
        _same_tensors("input", file.inputs, {**_step_arrays(manifest.model), **_states(manifest.model), **weights})
        _Walk(file, phase, manifest).run()
    except SchemaError as error:
        text = str(error)
        for name, size in sorted(_SIZES.items(), reverse=True):
            text = text.replace(str(size), name)
        raise SchemaError(text) from None


# --- What a graph must have ---------------------------------------------------------------------------------------


def _arrays(arrays: ArrayTypes) -> dict[str, GraphTensor]:
    return {
        name: GraphTensor(_DTYPES[dtype], tuple(int(dim) if dim.isdecimal() else dim for dim in shape))
        for name, (dtype, shape) in arrays.items()
    }


def _step_arrays(config: ModelConfig) -> dict[str, GraphTensor]:
    needed = {"page_table": bool(config.full_layers), "ring_slot": bool(config.sliding_layers)}
    return {name: tensor for name, tensor in _arrays(STEP_ARRAYS).items() if needed.get(name, True)}


def _states(config: ModelConfig) -> dict[str, GraphTensor]:
    found = {}
    for layer in range(config.num_hidden_layers):
        pool, tokens = "slots", ring_tokens(config.sliding_window)
        if config.is_full(layer):
            pool, tokens = "pages", PAGE_TOKENS
        found[f"kv.{layer}"] = GraphTensor("bf16", (pool, config.num_key_value_heads, 2, tokens, config.head_dim))
    for name, state in sampling_states(config.vocab_size).items():
        found[name] = GraphTensor(_DTYPES[state.dtype], ("sample_slots", *state.shape))
    return found


def _model_fields(manifest: Manifest, phase: Phase, layer: int) -> dict[str, FieldValue]:
    """The value of every field that a node of a layer may have."""
    c, full = manifest.model, manifest.model.is_full(layer)
    return {
        "weights": manifest.weights,
        "phase": phase,
        "eps": float(np.float32(c.rms_norm_eps)),
        "attention": "full" if full else "sliding",
        "window": 0 if full else c.sliding_window,
        "has_residual": int(layer > 0),
        "num_heads": c.num_attention_heads,
        "num_kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "top_k": c.num_experts_per_tok,
    }


def _model_sizes(manifest: Manifest, op: str) -> dict[str, int]:
    """The value of every symbol of an op's schema but those that follow from the others."""
    c = manifest.model
    return {symbol: _SIZES[name] for symbol, name in _SYMBOLS.items()} | {
        "V": c.vocab_size,
        "H": c.hidden_size,
        "I": c.intermediate_size if op == "NormMlp" else c.moe_intermediate_size,
        "S": c.shared_expert_intermediate_size,
        "E": c.num_experts,
        "Hq": c.num_attention_heads,
        "Hkv": c.num_key_value_heads,
        "D": c.head_dim,
        "W": ring_tokens(c.sliding_window),
        "C": manifest.limits.max_context,
    }


def _same_tensors(kind: str, found: Mapping[str, GraphTensor], wanted: Mapping[str, GraphTensor]) -> None:
    if missing := sorted(wanted.keys() - found.keys()):
        raise SchemaError(f"it has no {kind} {', '.join(missing[:5])}")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise SchemaError(
            f"the {kind} {', '.join(unknown[:5])} is no step array, state, result or tensor of a weight file"
        )
    for name, tensor in wanted.items():
        if found[name] != tensor:
            raise SchemaError(f"the {kind} {name} must be {_text(tensor)}, found {_text(found[name])}")


def _text(tensor: GraphTensor) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


# --- The nodes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """A tensor inside of the graph, its varying dimensions replaced by their _SIZES."""

    dtype: DType
    shape: tuple[int, ...]
    state: str | None = None
    """The state whose memory it is."""


class _Walk:
    """Goes through a graph's nodes as an executor does, with shapes for tensors."""

    def __init__(self, file: GraphFile, phase: Phase, manifest: Manifest) -> None:
        self._file, self._phase, self._manifest = file, phase, manifest
        states = _states(manifest.model)
        self._values = {
            name: _Value(given.dtype, _concrete(given.shape), name if name in states else None)
            for name, given in file.inputs.items()
        }
        self._read: set[str] = set()
        self._latest = {state: state for state in states}
        """The name that a state has behind its last update."""
        self._layer, self._mlps = -1, 0

    def run(self) -> None:
        """Raise SchemaError at the first node that does not fit, or where the graph is not whole."""
        for node in self._file.nodes:
            try:
                self._check_place(node)
                self._check_node(node)
            except SchemaError as error:
                raise SchemaError(f"node {node.name}: {error}") from None
        layers = self._manifest.model.num_hidden_layers
        if (self._layer + 1, self._mlps) != (layers, layers):
            raise SchemaError(f"it has {self._layer + 1} layers and {self._mlps} MLPs, the model has {layers} layers")
        self._check_outputs()

    def _check_place(self, node: GraphNode) -> None:
        """Count layers: each begins with its attention and has the MLP of its kind."""
        config = self._manifest.model
        self._layer += node.op in _LAYER_STARTS
        if self._layer >= config.num_hidden_layers:
            raise SchemaError(f"the model has {config.num_hidden_layers} layers only")
        if self._layer < 0 and "attention" in node.fields:
            raise SchemaError("no node before it begins a layer")
        if node.op in _MLPS:
            if self._layer != self._mlps or (node.op == "NormMlp") != config.is_dense(self._layer):
                raise SchemaError(f"the MLP of layer {self._layer} stands elsewhere, or is of the other kind")
            self._mlps += 1

    def _check_node(self, node: GraphNode) -> None:
        op = OPS[node.op]
        fields = _model_fields(self._manifest, self._phase, max(0, self._layer))
        for name, value in node.fields.items():
            if value != fields[name]:
                raise SchemaError(f"{name} is {value!r:.80}, the model's is {fields[name]!r:.80}")
        inputs = [self._take(name) for name in node.inputs]
        symbols = op.solve(node.fields, [x.shape for x in inputs], [x.dtype for x in inputs])
        sizes = _model_sizes(self._manifest, node.op)
        for symbol, size in symbols.items():
            if size != sizes.get(symbol, size):
                whose = "limits.max_context" if symbol == "C" else "the model's"
                raise SchemaError(f"{_MEANINGS.get(symbol, symbol)} is {size}, {whose} is {sizes[symbol]}")
        sources = {b.name: name for b, name in zip(op.node_inputs(node.fields), node.inputs, strict=True)}
        if "kv_pool" in sources and self._values[sources["kv_pool"]].state != f"kv.{self._layer}":
            raise SchemaError(f"kv_pool must be kv.{self._layer}, found {sources['kv_pool']}")
        outputs = op.node_outputs(node.fields)
        if len(node.outputs) != len(outputs):
            raise SchemaError(f"expected {len(outputs)} outputs, found {len(node.outputs)}")
        shapes = op.output_shapes(node.fields, symbols)
        for binding, name, shape in zip(outputs, node.outputs, shapes, strict=True):
            if name in self._values:
                raise SchemaError(f"output {binding.name} is {name}, which exists already")
            if binding.alias:
                self._values[name] = self._update(name, sources[binding.alias])
            else:
                self._values[name] = _Value(binding.dtypes[0], shape)

    def _take(self, name: str) -> _Value:
        """A node's input."""
        value = self._values.get(name)
        if value is None:
            raise SchemaError(f"it reads {name}, which no input and no node before it gives")
        if value.state and self._latest[value.state] != name:
            raise SchemaError(f"it reads {name}, which a node before it has updated to {self._latest[value.state]}")
        self._read.add(name)
        return value

    def _update(self, name: str, source: str) -> _Value:
        """A node's output that is one of its inputs, changed in place."""
        value = self._values[source]
        if value.state is None or self._latest[value.state] != source:
            raise SchemaError(f"it updates {source}, which is no state or is updated already")
        self._latest[value.state] = name
        return value

    def _check_outputs(self) -> None:
        """Outputs are the results of a step and the states that it updates; nothing is computed for nobody."""
        declared = self._file.outputs
        wanted = _arrays(RESULT_ARRAYS) | {"logits": GraphTensor("f32", ("R", self._manifest.model.vocab_size))}
        wanted |= {name: self._file.inputs[state] for state, name in self._latest.items() if name != state}
        _same_tensors("output", declared, wanted)
        for name, tensor in wanted.items():
            value = self._values.get(name)
            if value is None or (value.dtype, value.shape) != (tensor.dtype, _concrete(tensor.shape)):
                raise SchemaError(f"no node gives the output {name} as {_text(tensor)}")
        if unread := sorted(self._values.keys() - self._read - declared.keys()):
            raise SchemaError(f"nobody reads {', '.join(unread[:5])}")


def _concrete(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(_SIZES[dim] if isinstance(dim, str) else dim for dim in shape)
