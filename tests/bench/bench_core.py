"""What a decode step costs the host from end to end: scheduling, building, submitting and reading, on one core.

    python -m tests.bench.bench_core

`EngineCore.step` over the plugin-host executor, as it serves a GPU; CUDA and the plugin host answer at once and do
nothing (see `bench_host`), so that what is left is our Python. Every stream has a context of 1,000 tokens and more, a
seed, top-k and top-p. Judged by the best tenth of the steps: on a machine that others use, too, the rest tells of them.
Exit code 1 if a limit is missed.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time

from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.executors.base import Executor
from flint_runtime.request import EngineRequest
from flint_runtime.sampling_params import SamplingParams
from tests.bench.bench_host import open_mocked

LIMITS_US = {1: 60.0, 64: 400.0}
"""By batch."""
STEPS = 2000
PROMPT = 1000


def measure(executor: Executor, batch: int) -> list[float]:
    """Microseconds of every step of `batch` streams, in order of size."""
    core = EngineCore(executor, CoreConfig(kv_cache_memory_bytes=1 << 30))
    params = SamplingParams(temperature=1.0, seed=1).with_defaults({})
    for index in range(batch):
        prompt = [index + 1] * (PROMPT + index)
        core.add(EngineRequest(str(index), prompt, params, STEPS + 500, frozenset({3}), frozenset({3})))
    for _ in range(100):  # The first ones find their sizes; before that, the prompts.
        while len(core.step()) < batch:
            pass
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(STEPS):
        begin = time.perf_counter_ns()
        outputs = core.step()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        assert len(outputs) == batch
    for index in range(batch):
        core.abort(str(index))
    while core.has_work():
        core.step()
    return sorted(times)


def main() -> int:
    """Measure and print."""
    missed = False
    with open_mocked() as executor:
        for batch, most in LIMITS_US.items():
            times = measure(executor, batch)
            best = times[len(times) // 10]
            missed = missed or best > most
            print(
                f"batch {batch:3}: {best:6.1f} us a step in the best tenth (limit {most:.0f}), "
                f"median {statistics.median(times):.1f}, 99th percentile {times[len(times) * 99 // 100]:.1f}"
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
