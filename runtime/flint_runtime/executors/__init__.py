"""What runs a step of the model: one interface (`base`), one module per way to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flint_runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from flint_runtime.engine import Engine
    from flint_runtime.executors.base import Executor

ExecutorChoice = Literal["auto", "plugin-host", "reference"]


def open_executor(engine: Engine, choice: ExecutorChoice = "auto") -> Executor:
    """Open an executor for an engine.

    Args:
        choice: "auto" takes the best one that runs here: plugin-host on a GPU that the engine was built for.
    Raises:
        UnsupportedError: what the executor needs is not installed.
        EngineError: the executor cannot run this engine.
        ResourceError: the engine does not fit the GPU.
    """
    from flint_runtime.executors import plugin_host

    if choice == "plugin-host" or (choice == "auto" and plugin_host.problem_here(engine) is None):
        return plugin_host.PluginHostExecutor(engine)
    # No import of torch before it is needed: the other executors do without it.
    try:
        from flint_runtime.executors.reference import ReferenceExecutor
    except ImportError as error:
        raise UnsupportedError(
            f"The reference executor needs torch, which does not load here ({error}). Install it with: "
            "pip install 'flint-tensorrt[reference]'"
        ) from error
    return ReferenceExecutor.open(engine.directory)
