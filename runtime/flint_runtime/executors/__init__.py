"""What runs a step of the model: one interface (`base`), one module per way to run it.

`gpu` holds what the two GPU executors share; who runs the graph is `plugin_host` or `tensorrt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flint_runtime.errors import FlintError, UnsupportedError

if TYPE_CHECKING:
    from flint_runtime.engine import Engine
    from flint_runtime.executors.base import Executor
    from flint_runtime.executors.gpu import GpuExecutor

ExecutorChoice = Literal["auto", "tensorrt", "plugin-host", "reference"]


def open_executor(engine: Engine, choice: ExecutorChoice = "auto") -> Executor:
    """Open an executor for an engine.

    Args:
        choice: "auto" takes the first one that can run the engine here: tensorrt where the engine holds plans,
            plugin-host, and reference, which needs no GPU.
    Raises:
        UnsupportedError: what the executor needs is not installed.
        EngineError: the executor cannot run this engine.
        ResourceError: the engine does not fit the GPU.
    """
    for executor in _gpu_executors():
        if choice == executor.name or (choice == "auto" and _runs_here(executor, engine)):
            return executor(engine)
    # No import of torch before it is needed: the other executors do without it.
    try:
        from flint_runtime.executors.reference import ReferenceExecutor
    except ImportError as error:
        raise UnsupportedError(
            f"The reference executor needs torch, which does not load here ({error}). Install it with: "
            "pip install 'flint-tensorrt[reference]'"
        ) from error
    return ReferenceExecutor.open(engine.directory)


def _gpu_executors() -> tuple[type[GpuExecutor], ...]:
    """In the order of preference."""
    from flint_runtime.executors.plugin_host import PluginHostExecutor
    from flint_runtime.executors.tensorrt import TensorRtExecutor

    return TensorRtExecutor, PluginHostExecutor


def _runs_here(executor: type[GpuExecutor], engine: Engine) -> bool:
    try:
        executor.check_here(engine)
    except FlintError:
        return False
    return True
