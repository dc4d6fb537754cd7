"""The TensorRT executor: runs an engine's plans through `tensorrt` or `tensorrt_rtx`, whichever built them.

NOT EXECUTED ON A GPU YET. TensorRT-RTX loads plans on compute capability 8.x and 12.x, and no such GPU was at hand.
What ran are the tests on a CPU: bindings against networks that TensorRT-RTX parsed, and the calls, in their order,
against a stand-in for the module.

Everything but who runs the graph is `GpuExecutor`'s. A context's device memory is the arena; outputs that update an
input in place are given the input's address. A decode step whose sizes come for the second time becomes a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flint_plugins.ops import DOMAIN, VERSION, DType
from flint_runtime.engine import Engine
from flint_runtime.errors import EngineError, UnsupportedError
from flint_runtime.executors import cuda
from flint_runtime.executors.gpu import GpuExecutor, Launch
from flint_runtime.executors.graph_file import GraphFile
from flint_runtime.executors.host_graph import size_ranges
from flint_runtime.executors.staging import ALIGNMENT
from flint_runtime.manifest import Backend, Phase

MODULES: dict[Backend, tuple[str, str]] = {
    "tensorrt-rtx": ("tensorrt_rtx", "rtx"),
    "tensorrt": ("tensorrt", "tensorrt"),
}
"""Python module of a backend and the extra that installs it."""

DATA_TYPES: dict[DType, str] = {"bf16": "BF16", "f32": "FLOAT", "i32": "INT32", "i8": "INT8"}
"""Names in `DataType`."""

_MAX_QUOTED = 4
"""Messages that an error quotes."""

Shape = tuple[int, ...]
TensorInfo = tuple[bool, str, Shape]
"""Of a binding: whether it is an input, its type's name in `DataType`, its shape with -1 where a size varies."""


class TensorRtExecutor(GpuExecutor):
    """Runs an engine through TensorRT; see `GpuExecutor`."""

    name = "tensorrt"

    @classmethod
    def check_here(cls, engine: Engine, library: Path | None = None) -> None:
        """See `GpuExecutor.check_here`; also refuses an engine without plans, and another TensorRT than its own."""
        manifest = engine.manifest
        if manifest.backend not in MODULES:
            raise EngineError(
                f"Engine {engine.directory} was built for the backend {manifest.backend} and holds no TensorRT plans. "
                "Run it with --executor plugin-host, or rebuild it with: build-engine CHECKPOINT --backend "
                f"tensorrt-rtx --target {','.join(manifest.targets)} -o DIR"
            )
        engine.check_backend(manifest.backend, str(import_backend(manifest.backend).__version__))
        super().check_here(engine, library)

    def _open_graphs(self, library: Path) -> int:
        session = _session(self.engine.manifest.backend)
        session.load_plugins(library, dict.fromkeys(node.op for file in self.files.values() for node in file.nodes))
        self._contexts = {phase: _Context(session, self.engine, phase, file) for phase, file in self.files.items()}
        most = max(context.memory_bytes for context in self._contexts.values())
        self._logits_at = -(-most // ALIGNMENT) * ALIGNMENT
        return self._logits_at + max(self.limits.logits_rows, self.limits.decode_tokens) * self.config.vocab_size * 4

    def _bind(self, phase: Phase, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> Launch:
        given = {**addresses, "logits": self._arena.address + self._logits_at}
        given |= {output: addresses[source] for output, source in self.files[phase].aliases().items()}
        context = self._contexts[phase]
        tensors = {name: given[name] for name in (*self.files[phase].inputs, *self.files[phase].outputs)}

        def enqueue() -> None:
            context.enqueue(shapes, tensors, self._arena.address, self._stream)

        if phase == "decode" and context.is_capturable(self._stream):
            return _CapturedRun(enqueue, self._stream).launch
        return enqueue

    def _logits_offset(self, phase: Phase) -> int:
        return self._logits_at

    def _close_graphs(self) -> None:
        self._contexts.clear()


class _CapturedRun:
    """Runs eagerly twice, then as a CUDA graph.

    It is captured behind an eager run of the same sizes: what TensorRT does when shapes have changed is no part of it.
    """

    def __init__(self, enqueue: Launch, stream: cuda.Stream) -> None:
        self._enqueue, self._stream = enqueue, stream
        self._graph: cuda.Graph | None = None
        self._seen = False

    def launch(self) -> None:
        """Put the run on the stream."""
        if self._graph:
            self._graph.launch(self._stream)
            return
        self._enqueue()
        if self._seen:
            self._graph = cuda.Graph(self._stream, self._enqueue)
        self._seen = True


class _Context:
    """A phase's plan, deserialised, with one execution context."""

    def __init__(self, session: _Session, engine: Engine, phase: Phase, file: GraphFile) -> None:
        path = engine.plan_path(phase)
        session.messages.clear()
        runtime = session.trt.Runtime(session.logger)
        # A plan may carry the plugin library, which is the engine's own like the one beside it.
        runtime.engine_host_code_allowed = True
        plan = runtime.deserialize_cuda_engine(path.read_bytes())
        if plan is None:
            raise EngineError(
                f"{path} cannot be loaded: {session.quoted()}. Check it with run-engine verify, or rebuild the engine."
            )
        problems = binding_problems(expected_bindings(file), plan_bindings(session.trt, plan))
        problems = problems or profile_problems(expected_profile(engine, phase, file), plan)
        if problems:
            raise EngineError(
                f"{path} does not fit graph/{phase}.onnx and the engine's limits: {'; '.join(problems[:_MAX_QUOTED])}. "
                "Rebuild the engine."
            )
        self._session, self._phase = session, phase
        # TensorRT wants the runtime and the plan to outlive the context.
        self._runtime, self._plan = runtime, plan
        self.memory_bytes: int = plan.device_memory_size_v2
        self._context = plan.create_execution_context(session.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise EngineError(f"{path}: TensorRT made no execution context: {session.quoted()}.")
        self._memory = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def is_capturable(self, stream: cuda.Stream) -> bool:
        """Whether `enqueue` may be captured; TensorRT, unlike TensorRT-RTX, captures any graph of ours."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return ask is None or bool(ask(stream.handle))

    def enqueue(
        self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int], memory: int, stream: cuda.Stream
    ) -> None:
        """Put a run on a stream. What the context was told before is not told again."""
        context = self._context
        self._session.messages.clear()
        if memory != self._memory:
            context.set_device_memory(memory, self.memory_bytes)
            self._memory = memory
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._must(context.set_input_shape(name, shape), f"refused the shape {list(shape)} of {name}")
                self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                self._must(context.set_tensor_address(name, address), f"refused the address of {name}")
                self._addresses[name] = address
        self._must(context.execute_async_v3(stream.handle), "did not run")

    def _must(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise EngineError(f"TensorRT {what} ({self._phase} plan): {self._session.quoted()}.")


# --- Bindings -----------------------------------------------------------------------------------------------------


def expected_bindings(file: GraphFile) -> dict[str, TensorInfo]:
    """What a plan of a graph must have."""
    return {
        name: (is_input, DATA_TYPES[given.dtype], tuple(-1 if isinstance(dim, str) else dim for dim in given.shape))
        for is_input, tensors in ((True, file.inputs), (False, file.outputs))
        for name, given in tensors.items()
    }


def plan_bindings(trt: Any, plan: Any) -> dict[str, TensorInfo]:
    """What a deserialised plan has."""
    names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
    return {
        name: (
            plan.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            plan.get_tensor_dtype(name).name,
            tuple(plan.get_tensor_shape(name)),
        )
        for name in names
    }


def binding_problems(expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo]) -> list[str]:
    """How a plan's bindings differ from its graph's."""

    def text(info: TensorInfo) -> str:
        return f"{'input' if info[0] else 'output'} {info[1]} {list(info[2])}"

    problems = [f"it lacks {name}" for name in expected if name not in found]
    problems += [f"{name} is not in the graph" for name in found if name not in expected]
    problems += [
        f"{name} is {text(found[name])}, expected {text(info)}"
        for name, info in expected.items()
        if name in found and found[name] != info
    ]
    return problems


def expected_profile(engine: Engine, phase: Phase, file: GraphFile) -> dict[str, tuple[Shape, Shape]]:
    """Least and greatest shape of every input that varies, which a phase's plan must take."""
    ranges = size_ranges(engine.manifest.model, engine.manifest.limits, phase)
    least, most = (file.dynamic_shapes({name: sizes[i] for name, sizes in ranges.items()}) for i in (0, 2))
    return {name: (least[name], most[name]) for name in least}


def profile_problems(expected: Mapping[str, tuple[Shape, Shape]], plan: Any) -> list[str]:
    """How a plan's optimization profile differs from it: the plan of another phase, or of other limits."""
    problems = []
    for name, (least, most) in expected.items():
        found_least, _, found_most = map(tuple, plan.get_tensor_profile_shape(name, 0))
        if (found_least, found_most) != (least, most):
            found, wanted = (f"{list(a)} to {list(b)}" for a, b in ((found_least, found_most), (least, most)))
            problems.append(f"it takes {name} from {found}, expected {wanted}")
    return problems


# --- The module ---------------------------------------------------------------------------------------------------


def import_backend(backend: Backend) -> Any:
    """The Python module that runs a backend's plans. Raises UnsupportedError, naming the extra that installs it."""
    module, extra = MODULES[backend]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            f"The engine's plans were built by {backend}, but the Python module {module} does not load here ({error}). "
            f"Install it with: pip install 'flint-tensorrt[{extra}]'; or use --executor plugin-host."
        ) from error


@dataclass
class _Session:
    """One backend in this process: TensorRT keeps one plugin registry per process."""

    trt: Any
    logger: Any
    library: Path | None = None
    messages: list[str] = field(default_factory=list)
    """Errors and warnings that TensorRT logged last."""

    def quoted(self) -> str:
        """The first messages, for an error."""
        texts = [" ".join(text.split()).rstrip(".") for text in dict.fromkeys(self.messages)]
        return "; ".join(texts[:_MAX_QUOTED]) or "it gave no reason"

    def load_plugins(self, library: Path, ops: Iterable[str]) -> None:
        """Register a library's plugins, once per process; `ops` must be among them."""
        library = library.resolve()
        if self.library == library:
            return
        if self.library is not None and library.read_bytes() != self.library.read_bytes():
            raise UnsupportedError(
                f"This process has already loaded the plugin library {self.library} and cannot load {library} beside "
                "it. Start another process."
            )
        if self.library is None:
            self.messages.clear()
            runtime = self.trt.Runtime(self.logger)  # The registry and the plugins find the logger while it lives.
            registry = self.trt.get_plugin_registry()
            registry.load_library(str(library))
            missing = [name for name in ops if registry.get_creator(name, VERSION, DOMAIN) is None]
            if missing:
                raise EngineError(
                    f"TensorRT did not load the plugins {', '.join(missing)} of {library}: {self.quoted()}."
                )
            del runtime
        self.library = library


@functools.cache
def _session(backend: Backend) -> _Session:
    trt = import_backend(backend)
    severities = trt.ILogger.Severity
    kept = (severities.INTERNAL_ERROR, severities.ERROR, severities.WARNING)

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # pybind11 asks for the explicit call.

        def log(self, severity: Any, text: str) -> None:
            if severity in kept:
                session.messages.append(text)

    session = _Session(trt, Logger())
    return session
