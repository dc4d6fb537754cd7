"""GPU memory of an engine: the released model's figures, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from flint_builder.graph import export_graph
from flint_builder.weights import weight_files
from flint_runtime.executors.graph_file import load_graph
from flint_runtime.executors.host_graph import build_graph, prepare_graph, size_ranges
from flint_runtime.executors.host_library import HostLibrary
from flint_runtime.manifest import PHASES, Limits
from flint_runtime.memory import KNOWN_GPUS, MemoryPlan
from tests.shapes import FLINT

LIMITS = Limits(max_batch=64, max_context=262144, prefill_chunk=8192)


def plan(weights: str = "nvfp4") -> MemoryPlan:
    files = weight_files(FLINT, weights, "bf16", LIMITS.max_context)  # type: ignore[arg-type]
    return MemoryPlan(FLINT, sum(t.bytes for f in files for t in f.tensors), LIMITS)


def test_components_of_the_released_model() -> None:
    memory = plan()
    assert memory.page_bytes == 14 * 2 * 4 * 128 * 2 * 64 == 28 * 1024 * 64
    assert memory.slot_bytes == 35 * 2 * 4 * 128 * 2 * 592
    assert memory.sample_slot_bytes == 150144 * (4 + 4) + 150144 // 8 + 4
    # 39.45 G quantised values at 0.5625 bytes, the BF16 embedding and routers, the FP32 RoPE table; the rest is small.
    expected = 39.45e9 * 0.5625 + 0.615e9 + 0.049e9 + 0.134e9
    assert abs(memory.weight_bytes / expected - 1) < 0.002
    assert memory.kv_bytes(262144) == 4096 * memory.page_bytes + memory.slot_bytes
    assert memory.kv_bytes(65) - memory.kv_bytes(64) == memory.page_bytes


@pytest.mark.parametrize(("chunk", "batch"), [(8192, 64), (2048, 8), (64, 64)])
def test_the_workspace_is_what_the_plugin_host_plans(chunk: int, batch: int, tmp_path: Path, plugins: Path) -> None:
    """An arena does not grow with layers: one of each kind at full width tells."""
    limits = Limits(max_batch=batch, max_context=4096, prefill_chunk=chunk)
    kinds = ("full_attention", "sliding_attention")
    config = FLINT.model_copy(update={"num_hidden_layers": 2, "layer_types": kinds, "mlp_only_layers": (0,)})
    files = weight_files(config, "nvfp4", "f32", limits.max_context)
    arenas = []
    for phase in PHASES:
        path = tmp_path / f"{phase}.onnx"
        path.write_bytes(export_graph(config, "nvfp4", files, limits, phase).model.SerializeToString())
        file = load_graph(path)
        graph = build_graph(HostLibrary(plugins), file)
        prepare_graph(graph, file, size_ranges(config, limits, phase))
        arenas.append(graph.arena_bytes)
        graph.close()
    assert MemoryPlan(config, 0, limits).workspace_bytes == pytest.approx(max(arenas), rel=0.02)


def test_full_context_fits_an_rtx_5090() -> None:
    gpu = next(g for g in KNOWN_GPUS if g.name == "RTX 5090")
    assert plan().largest_context(gpu.memory_bytes) == 262144
    assert plan("bf16").largest_context(gpu.memory_bytes) == 0


def test_largest_context_is_tight() -> None:
    memory = plan()
    budget = memory.total_bytes(100_032)
    assert memory.largest_context(budget) == 100_032
    assert memory.largest_context(budget - 1) == 100_032 - 64
    assert memory.total_bytes(memory.largest_context(budget, 2), 2) <= budget
