"""The plugin-host executor: runs an engine's graphs on the GPU through the plugins alone, without TensorRT or torch.

A decode step is one CUDA graph per shape. Prefill and decode share weights, states, arena and staging memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from flint_runtime.errors import EngineError
from flint_runtime.executors.gpu import GpuExecutor, Launch
from flint_runtime.executors.host_graph import build_graph, prepare_graph, size_ranges
from flint_runtime.executors.host_library import HostError, HostGraph, HostLibrary
from flint_runtime.manifest import Phase


class PluginHostExecutor(GpuExecutor):
    """Runs an engine through the plugin host; see `GpuExecutor`."""

    name = "plugin-host"

    def _open_graphs(self, library: Path) -> int:
        self.graphs: dict[Phase, HostGraph] = {}
        try:
            host = HostLibrary(library)
            for phase, file in self.files.items():
                self.graphs[phase] = build_graph(host, file)
                prepare_graph(self.graphs[phase], file, size_ranges(self.config, self.limits, phase))
        except HostError as error:
            raise EngineError(f"Engine {self.engine.directory}: {error}. Rebuild it.") from None
        return max(graph.arena_bytes for graph in self.graphs.values())

    def _bind(self, phase: Phase, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> Launch:
        run = self.graphs[phase].bind(shapes, addresses, self._arena.address)
        return functools.partial(run.launch, self._stream.handle, use_graph=phase == "decode")

    def _logits_offset(self, phase: Phase) -> int:
        return self.graphs[phase].placement("logits").offset

    def _close_graphs(self) -> None:
        for graph in self.graphs.values():
            graph.close()
