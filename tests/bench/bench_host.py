"""What a decode step costs the host: building it, submitting it and reading its result, with the device mocked away.

    python -m tests.bench.bench_host [--repeat N]

CUDA and the plugin host answer at once and do nothing, so that what is left is our Python. The figures are the median
over many steps, the sequences 700 tokens long; "submit + result" is what an executor adds to every step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from flint_plugins.library import find_library, library_info
from flint_runtime.engine import Engine
from flint_runtime.executors import cuda
from flint_runtime.executors.base import Executor
from flint_runtime.executors.plugin_host import PluginHostExecutor
from flint_runtime.executors.step import RowSampling, SequencePart, Step, build_step, check_step
from flint_runtime.manifest import Limits
from tests.runtime.engines import build_reference_engine, rewrite_manifest
from tests.runtime.null_cuda import NullCuda
from tests.shapes import NANO_DIRECTORY

BATCHES = (1, 8, 64)
CONTEXT = 700
BUDGET_US = {1: 25, 64: 120}
"""Submit and result."""


@contextmanager
def open_mocked() -> Iterator[PluginHostExecutor]:
    """flint-nano on a device that does nothing."""
    library = find_library()
    info = library_info(library)
    nothing = NullCuda(divmod(int(info.architectures[0][2:]), 10))
    with tempfile.TemporaryDirectory() as scratch, mock.patch.object(cuda, "_runtime", lambda: nothing):
        directory = build_reference_engine(
            NANO_DIRECTORY, Path(scratch) / "engine", Limits(max_batch=64, max_context=4096, prefill_chunk=512)
        )
        rewrite_manifest(directory, plugins_version=info.version, targets=list(info.architectures))
        executor = PluginHostExecutor(Engine.open(directory), library)
        executor.allocate(pages=64 * 64, slots=64, sample_slots=64)
        for graph in executor.graphs.values():
            graph.launch = lambda run, stream, use_graph: "replayed"  # type: ignore[method-assign]
        yield executor


def parts(batch: int) -> list[SequencePart]:
    """A token of each of `batch` sequences."""
    how = RowSampling(temperature=1.0, top_k=20, top_p=0.95, seed=(5, 7))
    pages = -(-CONTEXT // 64)
    return [
        SequencePart([5], CONTEXT - 1, np.arange(b * pages, (b + 1) * pages, dtype=np.int32), b,
                     [(-1, how._replace(sample_slot=b))])
        for b in range(batch)
    ]  # fmt: skip


def median_us(call: Callable[[], object], repeat: int) -> float:
    """Median microseconds of a call."""
    for _ in range(10):
        call()
    times = []
    gc.disable()
    try:
        for _ in range(repeat):
            started = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - started)
    finally:
        gc.enable()
    return statistics.median(times) / 1e3


def measure(executor: Executor, batch: int, repeat: int) -> dict[str, float]:
    """Microseconds by what they are spent on."""
    given = parts(batch)
    step: Step = build_step(given)
    exact: tuple[Any, ...] = (step, "decode", executor.config, executor.limits, executor.pools)
    return {
        "build_step": median_us(lambda: build_step(given), repeat),
        "submit + result": median_us(lambda: executor.submit("decode", step).result(), repeat),
        "check_step, in full": median_us(lambda: check_step(*exact), repeat // 4),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2000, help="steps per figure")
    options = parser.parse_args()
    with open_mocked() as executor:
        rows = {batch: measure(executor, batch, options.repeat) for batch in BATCHES}
    names = list(rows[BATCHES[0]])
    print("  ".join([f"{'batch':>5}", *(f"{name + ', µs':>{len(name) + 4}}" for name in names), "budget, µs"]))
    for batch, found in rows.items():
        figures = [f"{found[name]:{len(name) + 4}.1f}" for name in names]
        print("  ".join([f"{batch:5}", *figures, f"{BUDGET_US.get(batch, '-'):>10}"]))


if __name__ == "__main__":
    main()
