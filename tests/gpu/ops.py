"""Single ops on the GPU, through the plugin host: `run_op` for correctness, `time_op` for speed.

Needs torch, numpy and the plugin library (installed, or named by FLINT_PLUGINS_LIBRARY); no TensorRT, no pydantic.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flint_plugins.library import find_library
from flint_plugins.ops import OPS, DType, FieldValue
from flint_runtime.executors.host_library import HostGraph, HostLibrary
from tests.gpu.cuda_graph import CudaGraph

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i8": torch.int8,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
GUARD_BYTES = 4096
"""Bytes behind each output and the workspace that must stay as they are."""
_GUARD, _POISON = 0xA5, 0xFF
_INTEGER_POISON = 0x5A5A5A5A
"""Not -1, which Sample returns on purpose."""


@functools.cache
def library() -> HostLibrary:
    """The plugin library. Raises LibraryError where there is none."""
    return HostLibrary(find_library())


class _Guarded:
    """Device memory of a size, and guard bytes behind it."""

    def __init__(self, what: str, size: int) -> None:
        self.what, self.size = what, size
        self.memory = torch.full((max(size, 1) + GUARD_BYTES,), _GUARD, dtype=torch.uint8, device="cuda")
        self.fill()

    def fill(self) -> None:
        self.memory[: self.size] = _POISON

    def check(self) -> None:
        behind = self.memory[max(self.size, 1) :]
        if not bool((behind == _GUARD).all()):
            first = int((behind != _GUARD).nonzero()[0]) + self.size
            raise RuntimeError(f"{self.what}: {self.size} bytes, but byte {first} was written, too")


class Op:
    """One node with its inputs, outputs and workspace, which can run any number of times.

    Attributes:
        inputs: by binding name, CUDA tensors. The node reads these very tensors, so their content may be changed.
        outputs: by binding name. An aliased output is the input tensor itself.
        workspace_bytes: what the node asked for.
    Raises:
        RuntimeError: the plugin or the host refuses, with its message.
    """

    def __init__(
        self,
        op_name: str,
        fields: Mapping[str, FieldValue],
        inputs: Mapping[str, Tensor],
        *,
        use_graph: bool = False,
    ) -> None:
        """Create and configure the plugin.

        Args:
            use_graph: launch through a CUDA graph: the first run is eager, the second captured, later ones replayed.
        """
        op, fields = OPS[op_name], dict(fields)
        bindings = op.node_inputs(fields)
        names = [binding.name for binding in bindings]
        if set(inputs) != set(names):
            raise RuntimeError(f"{op_name}: expected the inputs {names}, found {sorted(inputs)}")
        self.inputs = {name: _checked(op_name, name, inputs[name]) for name in names}
        self.outputs: dict[str, Tensor] = {}
        self._use_graph, self._guards = use_graph, list[_Guarded]()
        self._aliased: dict[str, Tensor] = {}
        self._graph = graph = HostGraph(library())
        shapes = {name: tuple(tensor.shape) for name, tensor in self.inputs.items()}
        for name, tensor in self.inputs.items():
            graph.add_input(name, DTYPE_NAMES[tensor.dtype], shapes[name])
        outputs = op.node_outputs(fields)
        graph.add_node(op_name, op_name, fields, names, [binding.name for binding in outputs])
        for binding in outputs:
            graph.mark_output(binding.name)
        graph.prepare(shapes)
        graph.set_shapes(shapes)
        addresses = {name: _address(tensor) for name, tensor in self.inputs.items()}
        for binding in outputs:
            if binding.alias:
                self.outputs[binding.name] = self._aliased[binding.name] = self.inputs[binding.alias]
                continue
            dtype, shape = graph.shape(binding.name)
            self.outputs[binding.name] = self._output(f"{op_name} output {binding.name}", TORCH_DTYPES[dtype], shape)
            addresses[binding.name] = _address(self.outputs[binding.name])
        self.workspace_bytes = graph.arena_bytes
        self._guards.append(_Guarded(f"{op_name} workspace", self.workspace_bytes))
        self._run = graph.bind(shapes, addresses, self._guards[-1].memory.data_ptr())
        self.poison()

    def _output(self, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = dtype.itemsize
        for n in shape:
            size *= n
        guarded = _Guarded(what, size)
        self._guards.append(guarded)
        return guarded.memory[:size].view(dtype).view(shape)

    def poison(self) -> None:
        """Fill outputs and workspace with NaN (floats) or nonsense; aliased outputs stay."""
        for guarded in self._guards:
            guarded.fill()
        for name, tensor in self.outputs.items():
            if name not in self._aliased and tensor.dtype == torch.int32:
                tensor.fill_(_INTEGER_POISON)

    def launch(self, stream: torch.cuda.Stream | None = None) -> str:
        """Put one run on a stream (the current one if None) and return how: "eager", "captured" or "replayed"."""
        return self._run.launch((stream or torch.cuda.current_stream()).cuda_stream, use_graph=self._use_graph)

    def check_guards(self) -> None:
        """Wait, and raise RuntimeError where memory behind an output or the workspace was written."""
        torch.cuda.synchronize()
        for guarded in self._guards:
            guarded.check()

    def __call__(self) -> dict[str, Tensor]:
        """Run once, with outputs and workspace poisoned before, and wait. The next run overwrites the outputs."""
        stream = torch.cuda.current_stream()
        if self._use_graph and not stream.cuda_stream:
            stream = _stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            self.poison()
            self.launch(stream)
        self.check_guards()
        return self.outputs


def run_op(
    op_name: str, fields: Mapping[str, FieldValue], inputs: Mapping[str, Tensor], use_graph: bool = False
) -> dict[str, Tensor]:
    """Run one op once and return its outputs by name, after synchronising.

    Outputs and workspace are poisoned before (floats NaN), and memory behind them is checked after. An aliased output
    is the input tensor itself, changed in place.

    Args:
        op_name, fields: the node, as in `flint_plugins.ops`.
        inputs: contiguous CUDA tensors by binding name; exactly those that the node has.
        use_graph: return what a captured CUDA graph computes, rather than a launch.
    Raises:
        RuntimeError: with the plugin's message.
    """
    op = Op(op_name, fields, inputs, use_graph=use_graph)
    if use_graph:
        before = {name: tensor.clone() for name, tensor in op._aliased.items()}
        op()  # Eager: loads the modules.
        for name, tensor in before.items():
            op._aliased[name].copy_(tensor)
        torch.cuda.synchronize()
    return op()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Timing(NamedTuple):
    """Of one run of an op, in milliseconds, and the kernels that it launches."""

    median_ms: float
    p95_ms: float
    kernels: int


def time_op(
    op_name: str,
    fields: Mapping[str, FieldValue],
    inputs: Sequence[Mapping[str, Tensor]],
    *,
    samples: int = 50,
    runs: int = 40,
) -> Timing:
    """Time an op: runs on several inputs in turn stand in one CUDA graph, as in a step, which is timed by CUDA events.

    Args:
        inputs: sets that are used in turn; together larger than L2, or it serves what DRAM must.
        samples: replays of the graph that the median is taken of, after three that do not count.
        runs: of the op in the graph, at least.
    Raises:
        RuntimeError: with the plugin's message.
    """
    ops = [Op(op_name, fields, one) for one in inputs]
    rounds, stream = -(-runs // len(ops)), _stream()
    stream.wait_stream(torch.cuda.current_stream())
    for op in ops:
        op.launch(stream)  # Loads the modules.
    stream.synchronize()
    graph = CudaGraph(stream.cuda_stream, lambda: [op.launch(stream) for _ in range(rounds) for op in ops])
    count = rounds * len(ops)
    times = []
    for sample in range(3 + samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        if sample >= 3:
            times.append(begin.elapsed_time(end) / count)
    graph.close()
    for op in ops:
        op.check_guards()
    times.sort()
    return Timing(statistics.median(times), times[int(0.95 * (len(times) - 1))], graph.kernels // count)


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _checked(op_name: str, name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.dtype not in DTYPE_NAMES:
        raise RuntimeError(
            f"{op_name}: input {name} must be a contiguous CUDA tensor of {sorted(TORCH_DTYPES)}, found "
            f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
        )
    return tensor


def _address(tensor: Tensor) -> int:
    """Of a tensor's first element; where it has none, an address that nothing may touch."""
    return tensor.data_ptr() or 256
