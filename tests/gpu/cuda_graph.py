"""A CUDA graph of anything that launches on a stream: how many kernels it has, and replays."""

from __future__ import annotations

from collections.abc import Callable

from flint_runtime.executors import cuda


class CudaGraph:
    """What `launch` puts on a stream, captured. Everything must have run once before, so that no module loads now.

    Attributes:
        kernels: launched by one replay.
    """

    def __init__(self, stream: int, launch: Callable[[], object]) -> None:
        runtime = cuda._runtime()
        # Relaxed: launchers may set kernel attributes meanwhile, and the stream is ours alone.
        cuda.call("cudaStreamBeginCapture", stream, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        try:
            launch()
        finally:
            graph = cuda.call("cudaStreamEndCapture", stream)
        _, count = cuda.call("cudaGraphGetNodes", graph, 0)
        nodes, _ = cuda.call("cudaGraphGetNodes", graph, count)
        kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
        self.kernels = sum(cuda.call("cudaGraphNodeGetType", node) == kernel for node in nodes[:count])
        self._stream = stream
        self._executable = cuda.call("cudaGraphInstantiate", graph, 0)
        cuda.call("cudaGraphDestroy", graph)

    def replay(self) -> None:
        """Put it on its stream once more."""
        cuda.call("cudaGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Free it; it must not be running."""
        cuda.call("cudaGraphExecDestroy", self._executable)
