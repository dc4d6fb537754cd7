"""The reference executor: walks an engine's ONNX graph node by node with PyTorch on the CPU.

Slow and plain on purpose: it is what the plugins are compared with, and it needs no GPU. Every node is checked against
its op's schema, before and after it runs. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from safetensors.torch import load_file
from torch import Tensor

from flint_plugins.ops import DOMAIN, OPS, PAGE_TOKENS, FieldValue, Op, SchemaError
from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, ResourceError
from flint_runtime.executors.base import PROMPT_FLAG, Executor, StepResult
from flint_runtime.executors.reference_ops import REFERENCE_OPS
from flint_runtime.executors.reference_weights import DEFAULT_BUDGET_BYTES, WeightCache
from flint_runtime.executors.step import Pools, Step, check_step, sampling_states
from flint_runtime.manifest import PHASES, Phase, ring_tokens

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int8: "i8"}
_PLUGIN_ATTRIBUTES = ("plugin_version", "plugin_namespace")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Node:
    """One node of a graph, and the values that nothing after it reads."""

    name: str
    op: Op
    fields: dict[str, FieldValue]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_used: tuple[str, ...]
    checked: dict[Shapes, list[tuple[int, ...]]]
    """Output shapes by input shapes that the schema has accepted."""


@dataclass(frozen=True)
class _Graph:
    nodes: tuple[_Node, ...]
    inputs: frozenset[str]


class ReferenceExecutor(Executor):
    """Runs an engine on the CPU. `states` are its KV pools and sampling states by graph input name."""

    def __init__(self, engine: Engine, cache_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        """Load the graphs and weights of an opened engine.

        Args:
            cache_bytes: how much memory unpacked weights may take.
        """
        self.engine = engine
        self.states: dict[str, Tensor] = {}
        self._cache = WeightCache(cache_bytes)
        self._pools = Pools(0, 0, 0)
        self._weights: dict[str, Tensor] = {}
        for path in engine.weight_paths():
            try:
                self._weights |= load_file(path)
            except Exception as error:  # safetensors raises its own types for what a damaged file may cause
                raise EngineError(f"{path} cannot be read: {error}. Copy the engine again or rebuild it.") from None
        self._graphs: dict[Phase, _Graph] = {phase: _load_graph(engine.graph_path(phase)) for phase in PHASES}
        for phase, graph in self._graphs.items():
            known = {*self._weights, *Step.__dataclass_fields__, *sampling_states(self.config.vocab_size)}
            missing = sorted(n for n in graph.inputs - known if not n.startswith("kv."))
            if missing:
                raise EngineError(
                    f"Engine {engine.directory}: no weight file holds {', '.join(missing[:5])}, an input of "
                    f"{phase}.onnx. Rebuild it."
                )

    @classmethod
    def open(cls, directory: Path) -> ReferenceExecutor:
        """Open an engine directory. Raises EngineError where it is damaged."""
        return cls(Engine.open(directory))

    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """Allocate the states, KV pools zeroed; see `Executor.allocate`."""
        config = self.config
        per_slot = (config.num_key_value_heads, 2, ring_tokens(config.sliding_window), config.head_dim)
        per_page = (config.num_key_value_heads, 2, PAGE_TOKENS, config.head_dim)
        self.states = {}
        try:
            for layer in range(config.num_hidden_layers):
                shape = (pages, *per_page) if config.is_full(layer) else (slots, *per_slot)
                self.states[f"kv.{layer}"] = torch.zeros(shape, dtype=torch.bfloat16)
            for name, state in sampling_states(config.vocab_size).items():
                array = np.full((sample_slots, *state.shape), state.initial, state.dtype)
                self.states[name] = torch.from_numpy(array)
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"{pages} pages and {slots} slots of KV do not fit the host's memory ({error}). Ask for less context."
            ) from None
        self._pools = Pools(pages, slots, sample_slots)

    @property
    def pools(self) -> Pools:
        """Sizes that were allocated."""
        return self._pools

    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Set a row of token_counts; see `Executor.begin_sequence`."""
        counts = self.states["token_counts"][sample_slot]
        ids = torch.tensor(list(generated), dtype=torch.long)
        counts.copy_(torch.bincount(ids, minlength=len(counts)))
        counts[torch.tensor(sorted(set(prompt)), dtype=torch.long)] += PROMPT_FLAG

    @torch.inference_mode()
    def run(self, phase: Phase, step: Step, *, logits: bool = False) -> StepResult:
        """Run one step; see `Executor.run`. Schema errors name the node."""
        check_step(step, phase, self.config, self.limits, self._pools)
        graph = self._graphs[phase]
        arrays = {name: torch.from_numpy(array) for name, array in step.arrays().items() if name in graph.inputs}
        values = {**self._weights, **self.states, **arrays}
        for node in graph.nodes:
            self._run_node(node, values)
            for name in node.last_used:
                del values[name]
        tokens, logprobs, top_tokens, top_logprobs = (
            values[name].numpy() for name in ("tokens", "logprobs", "top_tokens", "top_logprobs")
        )
        return StepResult(tokens, logprobs, top_tokens, top_logprobs, values["logits"].numpy() if logits else None)

    def _run_node(self, node: _Node, values: dict[str, Tensor]) -> None:
        """Check and run one node, adding its outputs to `values`."""
        inputs = [values[name] for name in node.inputs]
        shapes = tuple(tuple(x.shape) for x in inputs)
        wanted = node.checked.get(shapes)
        try:
            if wanted is None:
                symbols = node.op.solve(node.fields, shapes, [_DTYPES.get(x.dtype, str(x.dtype)) for x in inputs])
                wanted = node.checked[shapes] = node.op.output_shapes(node.fields, symbols)
            named = {b.name: x for b, x in zip(node.op.node_inputs(node.fields), inputs, strict=True)}
            results = REFERENCE_OPS[node.op.name](node.fields, named, self._cache)
            bindings = node.op.node_outputs(node.fields)
            for binding, name, shape in zip(bindings, node.outputs, wanted, strict=True):
                result = results[binding.name]
                if tuple(result.shape) != shape or _DTYPES.get(result.dtype) not in binding.dtypes:
                    raise SchemaError(
                        f"output {binding.name} is {result.dtype} {list(result.shape)}, expected {list(shape)}"
                    )
                if binding.alias and result.data_ptr() != named[binding.alias].data_ptr():
                    raise SchemaError(f"output {binding.name} does not share the memory of {binding.alias}")
                values[name] = result
        except SchemaError as error:
            raise SchemaError(f"node {node.name}: {error}") from None


def _load_graph(path: Path) -> _Graph:
    """Read an ONNX graph of plugin nodes. Raises EngineError where it is not one."""
    try:
        graph = onnx.load(path).graph
    except Exception as error:  # protobuf and onnx raise types of their own
        raise EngineError(f"{path} cannot be read: {error}. Copy the engine again or rebuild it.") from None
    kept = {value.name for value in (*graph.output, *graph.input)}
    last_use: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        last_use |= dict.fromkeys((*node.input, *node.output), index)
    nodes = []
    for index, node in enumerate(graph.node):
        if node.domain != DOMAIN or node.op_type not in OPS:
            raise EngineError(f"{path}: node {node.name} is {node.domain}.{node.op_type}, which is no plugin of ours.")
        op = OPS[node.op_type]
        fields = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            fields[attribute.name] = value.decode() if isinstance(value, bytes) else value
        fields = {name: value for name, value in fields.items() if name not in _PLUGIN_ATTRIBUTES}
        try:
            op.check_fields(fields)
        except SchemaError as error:
            raise EngineError(f"{path}: node {node.name}: {error}. Rebuild the engine.") from None
        names = {*node.input, *node.output} - kept
        dead = tuple(sorted(name for name in names if last_use[name] == index))
        nodes.append(_Node(node.name, op, fields, tuple(node.input), tuple(node.output), dead, {}))
    return _Graph(tuple(nodes), frozenset(value.name for value in graph.input))
