"""A stand-in for the module tensorrt_rtx that insists on TensorRT's rules and computes with the reference ops.

A plan is a pickled pair of ONNX graph and optimization profile (see tests.runtime.engines). What TensorRT refuses by
returning False or None, with a message to the logger, is refused here in the same way.
"""

from __future__ import annotations

import pickle
from enum import Enum
from types import SimpleNamespace
from typing import Any

import onnx
import torch

from flint_plugins.ops import OPS
from flint_runtime.executors.graph_file import GraphFile, GraphTensor, parse_graph
from flint_runtime.executors.reference_weights import WeightCache
from tests.runtime.fake_cuda import FakeCuda, compute

CONTEXT_BYTES = 1000

_Severity = Enum("_Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")
_DataType = Enum("_DataType", "BF16 FLOAT INT32 INT8")
_Mode = Enum("_Mode", "NONE INPUT OUTPUT")
_Strategy = Enum("_Strategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
_TYPES = {"bf16": _DataType.BF16, "f32": _DataType.FLOAT, "i32": _DataType.INT32, "i8": _DataType.INT8}


class FakeTensorRt:
    """The module. `loaded` are the plugin libraries that were registered."""

    __version__ = "1.7.1.116"
    TensorIOMode = _Mode
    ExecutionContextAllocationStrategy = _Strategy

    class ILogger:
        """Base of a caller's logger."""

        Severity = _Severity

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.loaded: list[str] = []
        self.contexts: list[_Context] = []

    def get_plugin_registry(self) -> Any:
        def load_library(path: str) -> object:
            assert not self.loaded, "the plugins are registered already"
            self.loaded.append(path)
            return object()

        def get_creator(name: str, version: str, namespace: str) -> object | None:
            return object() if self.loaded and name in OPS else None

        return SimpleNamespace(load_library=load_library, get_creator=get_creator)

    def Runtime(self, logger: Any) -> _Runtime:  # noqa: N802
        return _Runtime(self, logger)


class _Runtime:
    def __init__(self, trt: FakeTensorRt, logger: Any) -> None:
        self.trt, self.logger, self.engine_host_code_allowed = trt, logger, False

    def deserialize_cuda_engine(self, plan: bytes) -> _Plan | None:
        if not self.trt.loaded:
            self.logger.log(_Severity.ERROR, "no creator of the plugin Embedding")
            return None
        try:
            model, profile = pickle.loads(plan)
        except pickle.UnpicklingError:
            self.logger.log(_Severity.INFO, "Loading")
            self.logger.log(_Severity.ERROR, "Magic tag does not match.")
            return None
        return _Plan(self, parse_graph(onnx.load_model_from_string(model)), profile)


class _Plan:
    device_memory_size_v2 = CONTEXT_BYTES

    def __init__(self, runtime: _Runtime, file: GraphFile, profile: Any) -> None:
        self.runtime, self.file, self.profile = runtime, file, profile
        self.tensors: dict[str, GraphTensor] = {**file.inputs, **file.outputs}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> _Mode:
        return _Mode.INPUT if name in self.file.inputs else _Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> _DataType:
        return _TYPES[self.tensors[name].dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(dim, str) else dim for dim in self.tensors[name].shape)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        assert index == 0
        return list(self.profile[name])

    def create_execution_context(self, strategy: _Strategy) -> _Context:
        assert strategy == _Strategy.USER_MANAGED
        context = _Context(self)
        self.runtime.trt.contexts.append(context)
        return context


class _Context:
    def __init__(self, plan: _Plan) -> None:
        self.plan, self.cuda = plan, plan.runtime.trt.cuda
        self.shapes = {name: given.shape for name, given in plan.file.inputs.items() if _is_static(given)}
        self.addresses: dict[str, int] = {}
        self.runs = 0
        self._memory = False
        self._reshaped = True
        """Whether there was no run since a shape changed: TensorRT must then not be captured."""
        self._cache = WeightCache()

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 and size >= CONTEXT_BYTES
        self.cuda.bytes_at(memory, size)
        self._memory = True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.plan.profile.get(name, ((), (), ()))
        inside = len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
        if not inside:
            return self._refuse(f"{name} {shape} is outside of the profile, {least} to {most}")
        self._reshaped |= self.shapes.get(name) != shape
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self.plan.tensors or not address or address % 256:
            return self._refuse(f"{address} is no address for {name}")
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        file = self.plan.file
        missing = [name for name in file.inputs if name not in self.shapes]
        missing += [name for name in self.plan.tensors if name not in self.addresses]
        if missing or not self._memory or not stream:
            return self._refuse(f"not specified: {missing}, memory {self._memory}, stream {stream}")
        if self._reshaped and self.cuda.is_capturing(stream):
            return self._refuse("the stream is captured, and shapes have changed")
        for output, source in file.aliases().items():
            if self.addresses[output] != self.addresses[source]:
                return self._refuse(f"{output} must have the address of {source}")
        self._reshaped = False
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        self.cuda.enqueue(stream, lambda: self._compute(shapes, addresses))
        return True

    def _compute(self, shapes: dict[str, Any], addresses: dict[str, int]) -> None:
        file, self.runs = self.plan.file, self.runs + 1
        values = {
            name: self.cuda.tensor(given.dtype, shapes[name], addresses[name]) for name, given in file.inputs.items()
        }

        def place(name: str, result: torch.Tensor) -> torch.Tensor:
            if name not in file.outputs:
                return result
            dtype = file.outputs[name].dtype
            return self.cuda.tensor(dtype, tuple(result.shape), addresses[name]).copy_(result)

        compute(file, values, place, self._cache)

    def _refuse(self, text: str) -> bool:
        self.plan.runtime.logger.log(_Severity.ERROR, text)
        return False


def _is_static(given: GraphTensor) -> bool:
    return not any(isinstance(dim, str) for dim in given.shape)
