"""Build a TensorRT or TensorRT-RTX plan from an ONNX graph of plugin nodes.

The only place that chooses between the two modules. TensorRT-RTX builds without a GPU, for the targets asked for;
TensorRT builds on the GPU that the plan is for.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import onnx

from flint_plugins.library import LibraryError, check_library, find_stub
from flint_plugins.ops import DOMAIN, OPS, VERSION, FieldValue, SchemaError
from flint_runtime.errors import FlintError, UnsupportedError
from flint_runtime.executors.tensorrt import MODULES

PlanBackend = Literal["tensorrt-rtx", "tensorrt"]
Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""Per input with a dynamic dimension: its least, most usual and greatest shape."""
OnMessage = Callable[[str, str], None]
"""Called with severity ("error", "warning", "info", "verbose") and text of each TensorRT message."""

_RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
"""What TensorRT-RTX 1.7 offers."""
_MAX_QUOTED = 4
"""Messages that an error quotes; more only repeat the first ones from further out."""
_NOISE = ("--- Begin node", "--- End node", "catchCudaError")
"""In messages that say nothing: the parser's frame around a node, and that there is no driver, which no build needs."""
_build_lock = threading.Lock()


def import_backend(backend: PlanBackend) -> Any:
    """The backend's Python module.

    Raises:
        UnsupportedError: it is not installed, or its libraries cannot be loaded; names the extra that installs it.
    """
    if backend not in MODULES:
        raise UnsupportedError(
            f"There is no plan backend '{backend}'; choose one of {', '.join(get_args(PlanBackend))}."
        )
    module, extra = MODULES[backend]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            f"The backend {backend} cannot be used here: the Python module {module} does not load ({error}). Install "
            f"it with `pip install 'flint-tensorrt[{extra}]'`, or choose another --backend."
        ) from error


def is_importable(backend: PlanBackend) -> bool:
    """Whether the backend's Python module is installed and loads."""
    try:
        import_backend(backend)
    except UnsupportedError:
        return False
    return True


def backend_version(backend: PlanBackend) -> str:
    """The version of the backend's module, which a plan is bound to. Raises UnsupportedError like `import_backend`."""
    return str(import_backend(backend).__version__)


def supported_targets(backend: PlanBackend) -> tuple[str, ...]:
    """The targets, such as "sm120", that a plan can be built for here.

    TensorRT-RTX offers what its version knows, if it is not installed what 1.7 knows; TensorRT offers the GPU that is
    present, so nothing without one.
    """
    if backend == "tensorrt":
        present = present_target()
        return (present,) if present else ()
    if not is_importable(backend):
        return _RTX_TARGETS
    names = import_backend(backend).ComputeCapability.__members__
    return tuple(name.lower() for name in names if name.startswith("SM"))


def present_target() -> str | None:
    """The target of this machine's first GPU, or None where there is no GPU or no driver."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of device 0, whose handle is 0 by definition.
    device = ctypes.c_int()
    calls: tuple[Callable[[], int], ...] = (
        lambda: int(driver.cuInit(0)),
        lambda: int(driver.cuDeviceGet(ctypes.byref(device), 0)),
        lambda: int(driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)),
        lambda: int(driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)),
    )
    if any(call() != 0 for call in calls):
        return None
    return f"sm{major.value}{minor.value}"


def build_plan(
    onnx_bytes: bytes,
    *,
    backend: PlanBackend,
    targets: tuple[str, ...],
    library: Path,
    profiles: Sequence[Profile],
    embed_plugins: bool = False,
    on_message: OnMessage | None = None,
) -> bytes:
    """Build a plan.

    Args:
        onnx_bytes: a serialised ONNX model of `flint` nodes (see `flint_plugins.ops`). Outputs that alias an input may
            be outputs of the graph and inputs of later nodes.
        backend: the module to build with.
        targets: GPUs that the one plan is for. TensorRT-RTX takes several; TensorRT only the one that is present.
        library: the plugin library.
        profiles: one optimization profile each, of the same inputs.
        embed_plugins: put the library into the plan, so that loading the plan needs no library file.
        on_message: receives TensorRT's messages.
    Returns:
        The serialised plan. It holds no weights, because they are inputs of the graph. TensorRT-RTX 1.7 gives tensors
        between nodes other numbers in each build, so plans of several nodes differ in these bytes, not in length.
    Raises:
        UnsupportedError: the backend, target, GPU or plugin library does not serve. FlintError: the graph or a profile
            contradicts itself or the ops' schemas, or TensorRT failed; quotes the plugins' and TensorRT's messages.
    """
    import_backend(backend)
    _check_targets(backend, targets)
    _check_nodes(onnx_bytes)
    with _build_lock:
        session = _session(backend)
        session.load_plugins(library)
        return session.build(onnx_bytes, targets, library, profiles, embed_plugins, on_message)


def _check_targets(backend: PlanBackend, targets: tuple[str, ...]) -> None:
    offered = supported_targets(backend)
    if backend == "tensorrt" and not offered:
        raise UnsupportedError(
            f"The backend tensorrt builds a plan on the GPU that it is for, and this machine has no GPU or no driver. "
            f"Build for {', '.join(targets)} on a machine with that GPU, or choose --backend tensorrt-rtx (RTX 50, RTX "
            "PRO 6000, GB10) or plugin-host, which need none."
        )
    wrong = [target for target in targets if target not in offered]
    if not targets or wrong:
        cure = {
            "tensorrt-rtx": "Choose --backend tensorrt, on a machine with that GPU, or --backend plugin-host.",
            "tensorrt": "Build on a machine with that GPU, or choose another --backend.",
        }[backend]
        raise UnsupportedError(
            f"The backend {backend} cannot build a plan for {', '.join(wrong) or 'no target'} here; it offers "
            f"{', '.join(offered)}. {cure}"
        )
    if len(set(targets)) != len(targets):
        raise UnsupportedError(f"A target is given twice: {', '.join(targets)}.")


def _check_nodes(onnx_bytes: bytes) -> None:
    """Check fields and counts here, because TensorRT's parser drops attributes that a plugin does not ask for."""
    try:
        graph = onnx.load_model_from_string(onnx_bytes).graph
    except Exception as error:
        raise FlintError(f"The graph is not a serialised ONNX model ({error}).") from error
    for node in graph.node:
        where = f"Node '{node.name}' of the graph"
        if node.domain != DOMAIN or node.op_type not in OPS:
            raise FlintError(f"{where} is {node.domain}::{node.op_type}, which is no op of the plugin library.")
        fields: dict[str, FieldValue] = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            fields[attribute.name] = value.decode() if isinstance(value, bytes) else value
        found = fields.pop("plugin_namespace", None), fields.pop("plugin_version", None)
        if found != (DOMAIN, VERSION):
            raise FlintError(
                f"{where} needs the attributes plugin_namespace '{DOMAIN}' and plugin_version '{VERSION}', found "
                f"{found}."
            )
        op = OPS[node.op_type]
        try:
            op.check_fields(fields)
        except SchemaError as error:
            raise FlintError(f"{where}: {error}.") from error
        for kind, wanted, names in (
            ("inputs", op.node_inputs(fields), node.input),
            ("outputs", op.node_outputs(fields), node.output),
        ):
            if len(wanted) != len(names) or not all(names):
                raise FlintError(
                    f"{where}: {op.name} with these fields has the {kind} {', '.join(b.name for b in wanted)}; found "
                    f"{list(names)}."
                )


@dataclass
class _Session:
    """One backend in this process: TensorRT keeps one logger and one plugin registry per process, so we do too."""

    trt: Any
    logger: Any
    backend: PlanBackend
    library: Path | None = None
    messages: list[tuple[str, str]] = field(default_factory=list)
    """Severity and text of the messages of the present build."""
    on_message: OnMessage | None = None

    def receive(self, severity: str, text: str) -> None:
        """Keep a message and pass it on."""
        self.messages.append((severity, text))
        if self.on_message:
            self.on_message(severity, text)

    def load_plugins(self, library: Path) -> None:
        """Register the library's plugins, once per process."""
        library = library.resolve()
        if self.library is not None:
            if library != self.library and library.read_bytes() != self.library.read_bytes():
                raise UnsupportedError(
                    f"This process has already loaded the plugin library {self.library} and cannot load {library} "
                    "beside it. Start another process."
                )
            return
        try:
            check_library(library)
            if self.backend == "tensorrt-rtx":
                # Its ONNX parser opens "libtensorrt_rtx.so", a name that its wheel lacks, and ends the process if that
                # fails. The stub has the name, and is found by it because it is loaded already.
                ctypes.CDLL(str(find_stub()), mode=ctypes.RTLD_GLOBAL)
        except (LibraryError, OSError) as error:
            raise UnsupportedError(str(error)) from error
        builder = self.trt.Builder(self.logger)  # The registry and the plugins find the logger while a builder lives.
        registry = self.trt.get_plugin_registry()
        registry.load_library(str(library))
        missing = [name for name in OPS if registry.get_creator(name, VERSION, DOMAIN) is None]
        if missing:
            raise self.failure(f"TensorRT did not load the plugins {', '.join(missing)} of {library}")
        del builder
        self.library = library

    def build(
        self,
        onnx_bytes: bytes,
        targets: tuple[str, ...],
        library: Path,
        profiles: Sequence[Profile],
        embed_plugins: bool,
        on_message: OnMessage | None,
    ) -> bytes:
        """Build a plan; see `build_plan`."""
        self.messages.clear()
        self.on_message = on_message
        try:
            # One builder per plan: it numbers its networks, and the number goes into the plan.
            builder = self.trt.Builder(self.logger)
            network = builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            parser = self.trt.OnnxParser(network, self.logger)
            if not parser.parse(onnx_bytes):
                for index in range(parser.num_errors):
                    self.messages.append(("error", str(parser.get_error(index).desc())))
                raise self.failure(f"{self.backend} refused the graph")
            config = builder.create_builder_config()
            config.set_preview_feature(self.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
            if self.backend == "tensorrt-rtx":
                self._set_targets(config, targets)
            for number, profile in enumerate(profiles):
                config.add_optimization_profile(self._profile(builder, network, profile, number))
            if embed_plugins:
                config.plugins_to_serialize = [str(library.resolve())]
            plan = builder.build_serialized_network(network, config)
            if plan is None:
                raise self.failure(f"{self.backend} could not build a plan for {', '.join(targets)}")
            return bytes(plan)
        finally:
            self.on_message = None

    def _set_targets(self, config: Any, targets: tuple[str, ...]) -> None:
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            if not config.set_compute_capability(getattr(self.trt.ComputeCapability, target.upper()), index):
                raise UnsupportedError(
                    f"{self.backend} {self.trt.__version__} refused the target {target} among {', '.join(targets)}. "
                    "Build one engine per target."
                )

    def _profile(self, builder: Any, network: Any, profile: Profile, number: int) -> Any:
        """A TensorRT profile, checked: TensorRT's own messages about profiles name neither input nor profile."""
        inputs = {tensor.name: tuple(tensor.shape) for tensor in map(network.get_input, range(network.num_inputs))}
        unknown = [name for name in profile if name not in inputs]
        missing = [name for name, shape in inputs.items() if -1 in shape and name not in profile]
        if unknown or missing:
            raise FlintError(f"Profile {number} names no inputs {missing}, and {unknown} are no inputs of the graph.")
        result = builder.create_optimization_profile()
        for name, shapes in profile.items():
            corners = list(zip(*shapes, strict=False))
            fits = (
                all(len(shape) == len(inputs[name]) for shape in shapes)
                and all(low <= usual <= high for low, usual, high in corners)
                and all(
                    size in (-1, low) and size in (-1, high)
                    for size, (low, _, high) in zip(inputs[name], corners, strict=True)
                )
            )
            if not fits:
                raise FlintError(
                    f"Profile {number}: the least, usual and greatest shape of input {name} are {shapes}, which do not "
                    f"fit {inputs[name]} or are not in this order."
                )
            result.set_shape(name, *shapes)
        return result

    def failure(self, what: str) -> FlintError:
        """An error that quotes the plugins' messages, which name the cause, or else TensorRT's."""
        errors = [" ".join(text.split()) for severity, text in self.messages if severity == "error"]
        errors = [text for text in dict.fromkeys(errors) if not any(noise in text for noise in _NOISE)]
        ours = [text for text in errors if text.startswith(f"{DOMAIN}::")]
        quoted = "; ".join((ours or errors)[:_MAX_QUOTED]) or "it gave no reason"
        return FlintError(f"{what}: {quoted.rstrip('.')}.")


@functools.cache
def _session(backend: PlanBackend) -> _Session:
    trt = import_backend(backend)
    severities = {
        trt.ILogger.Severity.INTERNAL_ERROR: "error",
        trt.ILogger.Severity.ERROR: "error",
        trt.ILogger.Severity.WARNING: "warning",
        trt.ILogger.Severity.INFO: "info",
        trt.ILogger.Severity.VERBOSE: "verbose",
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # pybind11 asks for the explicit call.

        def log(self, severity: Any, text: str) -> None:
            session.receive(severities[severity], text)

    session = _Session(trt, Logger(), backend)
    return session
