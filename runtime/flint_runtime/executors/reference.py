"""The reference executor: walks an engine's ONNX graph node by node with PyTorch on the CPU.

Slow and plain on purpose: it is what the plugins are compared with, and it needs no GPU. Every node is checked against
its op's schema, before and after it runs, with the sizes of the step. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from flint_plugins.ops import OPS, DType, FieldValue, Op, SchemaError
from flint_runtime.engine import CURE, Engine
from flint_runtime.errors import EngineError, FlintError, ResourceError
from flint_runtime.executors.base import MAX_IN_FLIGHT, Executor, Pending, StepResult, too_many_in_flight
from flint_runtime.executors.engine_check import load_graphs
from flint_runtime.executors.graph_file import GraphFile
from flint_runtime.executors.reference_ops import REFERENCE_OPS
from flint_runtime.executors.reference_weights import DEFAULT_BUDGET_BYTES, WeightCache
from flint_runtime.executors.staging import RESULT_ARRAYS
from flint_runtime.executors.states import (
    States,
    bias_row,
    check_copies,
    check_sample_slot,
    count_row,
    mask_row,
)
from flint_runtime.executors.step import Pools, Step, StepChecker, sampling_states
from flint_runtime.executors.weight_file import read_headers
from flint_runtime.manifest import Phase

_TORCH_TYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i8": torch.int8,
}
_DTYPES = {dtype: name for name, dtype in _TORCH_TYPES.items()}

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


class _Finished(Pending):
    """A step that has run, and whose result counts as unread until it is asked for."""

    def __init__(self, executor: ReferenceExecutor, outcome: StepResult | Exception) -> None:
        self._executor, self._outcome = executor, outcome

    def done(self) -> bool:
        """See `Pending.done`."""
        return True

    def result(self) -> StepResult:
        """See `Pending.result`."""
        self._executor.unread.discard(self)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class ReferenceExecutor(Executor):
    """Runs an engine on the CPU. `states` are its KV pools and sampling states by graph input name."""

    def __init__(self, engine: Engine, cache_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        """Load the graphs and weights of an opened engine.

        Args:
            cache_bytes: how much memory unpacked weights may take.
        """
        self.engine = engine
        self.states: dict[str, Tensor] = {}
        self.unread: set[Pending] = set()
        """Steps whose results nobody has read."""
        self._cache = WeightCache(cache_bytes)
        self._pools = Pools(0, 0, 0)
        self._checker = StepChecker(self.config, self.limits, self._pools)
        self._weights: dict[str, Tensor] = {}
        paths = engine.weight_paths()
        files = load_graphs(engine, read_headers(paths))
        for path in paths:
            try:
                self._weights |= load_file(path)
            except Exception as error:  # safetensors raises its own types for what a damaged file may cause
                raise EngineError(f"{path} cannot be read: {error}. {CURE}") from None
        self._states = States(files.values())
        self._graphs: dict[Phase, _Graph] = {phase: _graph(file) for phase, file in files.items()}

    @classmethod
    def open(cls, directory: Path) -> ReferenceExecutor:
        """Open an engine directory. Raises EngineError where it is damaged."""
        return cls(Engine.open(directory))

    def close(self) -> None:
        """Drop weights and states."""
        self.states, self._weights = {}, {}

    # --- States -------------------------------------------------------------------------------------------------------

    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """Allocate the states, KV pools zeroed; see `Executor.allocate`."""
        pools = Pools(pages, slots, sample_slots)
        self.states = {}
        try:
            for name, given in self._states.inputs.items():
                self.states[name] = torch.zeros(self._states.shape(name, pools), dtype=_TORCH_TYPES[given.dtype])
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"{pages} pages and {slots} slots of KV do not fit the host's memory ({error}). Ask for less context."
            ) from None
        for name, state in sampling_states(self.config.vocab_size).items():
            self.states[name].fill_(state.initial)
        self._pools = pools
        self._checker = StepChecker(self.config, self.limits, pools)

    @property
    def pools(self) -> Pools:
        """Sizes that were allocated."""
        return self._pools

    def memory_available(self) -> None:
        """Unknown: the host swaps before it refuses."""
        return None

    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Reset a sample slot; see `Executor.begin_sequence`."""
        check_sample_slot(sample_slot, self._pools)
        self._set("token_counts", sample_slot, count_row(self.config.vocab_size, prompt, generated))
        self.states["logit_bias"][sample_slot] = 0
        self.states["token_mask"][sample_slot] = -1

    def set_logit_bias(self, sample_slot: int, bias: Mapping[int, float]) -> None:
        """Replace a slot's bias; see `Executor.set_logit_bias`."""
        check_sample_slot(sample_slot, self._pools)
        self._set("logit_bias", sample_slot, bias_row(self.config.vocab_size, bias))

    def set_token_mask(self, sample_slot: int, mask: npt.NDArray[np.int32 | np.uint32]) -> None:
        """Replace a slot's mask; see `Executor.set_token_mask`."""
        check_sample_slot(sample_slot, self._pools)
        self._set("token_mask", sample_slot, mask_row(self.config.vocab_size, mask))

    def _set(self, state: str, sample_slot: int, row: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> None:
        self.states[state][sample_slot] = torch.tensor(row)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy ring slots; see `Executor.copy_slots`."""
        check_copies(sources, targets, self._pools)
        for name in self._states.rings():
            for source, target in zip(sources, targets, strict=True):
                self.states[name][target] = self.states[name][source]

    # --- Steps --------------------------------------------------------------------------------------------------------

    def submit(self, phase: Phase, step: Step, *, logits: bool | Sequence[int] = False) -> Pending:
        """Run one step at once; see `Executor.submit`."""
        if len(self.unread) >= MAX_IN_FLIGHT:
            raise too_many_in_flight()
        self._checker.check(step, phase)
        outcome: StepResult | Exception
        try:
            outcome = self._run(phase, step, logits)
        except (FlintError, SchemaError) as error:
            outcome = error
        pending = _Finished(self, outcome)
        self.unread.add(pending)
        return pending

    def discard(self) -> None:
        """See `Executor.discard`."""
        self.unread.clear()

    @torch.inference_mode()
    def _run(self, phase: Phase, step: Step, logits: bool | Sequence[int]) -> StepResult:
        """Run one step. Schema errors name the node."""
        graph = self._graphs[phase]
        # Copies: a packed step's arrays cannot be written to, which torch warns of.
        arrays = {name: torch.from_numpy(array.copy()) for name, array in step.arrays().items() if name in graph.inputs}
        values = {**self._weights, **self.states, **arrays}
        for node in graph.nodes:
            self._run_node(node, values)
            for name in node.last_used:
                del values[name]
        results = {name: values[name].numpy() for name in RESULT_ARRAYS}
        wanted = slice(None) if logits is True else list(logits or ())
        return StepResult(**results, logits=values["logits"].numpy()[wanted] if logits else None)

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


def _graph(file: GraphFile) -> _Graph:
    kept = {*file.outputs, *file.inputs}
    last_use: dict[str, int] = {}
    for index, node in enumerate(file.nodes):
        last_use |= dict.fromkeys((*node.inputs, *node.outputs), index)
    nodes = []
    for index, node in enumerate(file.nodes):
        names = {*node.inputs, *node.outputs} - kept
        dead = tuple(sorted(name for name in names if last_use[name] == index))
        nodes.append(_Node(node.name, OPS[node.op], node.fields, node.inputs, node.outputs, dead, {}))
    return _Graph(tuple(nodes), frozenset(file.inputs))
