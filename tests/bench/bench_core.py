"""Host time per step: scheduling, building, submitting and reading, with the device mocked away.

    python -m tests.bench.bench_core

Prints the median over steps in microseconds, for all and for the core's part without the executor's (`build_step` and
`submit`). Exit code 1 if a limit is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from flint_runtime import engine_core
from flint_runtime.engine import Engine
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.executors.base import Pending, StepResult
from flint_runtime.executors.step import Step
from flint_runtime.manifest import Limits, Phase
from flint_runtime.request import EngineRequest
from flint_runtime.sampling_params import SamplingParams
from tests.manifests import manifest
from tests.runtime.fake_executor import FakeExecutor
from tests.shapes import FLINT

LIMITS_US = {1: 60.0, 64: 400.0}
"""By batch, for everything."""
STEPS = 2000
PROMPT = 1000


class _Ready(Pending):
    """A result that is there at once."""

    def __init__(self, rows: int) -> None:
        self._result = StepResult(
            np.full(rows, 7, np.int32),
            np.zeros(rows, np.float32),
            np.zeros((rows, 20), np.int32),
            np.zeros((rows, 20), np.float32),
        )

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class _NoDevice(FakeExecutor):
    """Takes any step and does nothing."""

    def __init__(self, limits: Limits) -> None:
        self.engine = Engine(Path("none"), manifest(model=FLINT, limits=limits))

    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        pass

    def memory_available(self) -> int | None:
        return 100 << 30

    def begin_sequence(self, *_: Any) -> None:
        pass

    def copy_slots(self, *_: Any) -> None:
        pass

    def submit(self, phase: Phase, step: Step, *, logits: bool = False) -> Pending:
        return _Ready(len(step.logits_rows))


def measure(batch: int) -> tuple[float, float]:
    """Median microseconds of a decode step: everything, and without `build_step`."""
    core = EngineCore(_NoDevice(Limits(max_batch=max(8, batch), max_context=262_144, prefill_chunk=8192)), CoreConfig())
    params = SamplingParams(temperature=1.0, seed=1).with_defaults({})
    for index in range(batch):
        prompt = [index + 1] * (PROMPT + index)
        core.add(EngineRequest(str(index), prompt, params, STEPS + 500, frozenset({3}), frozenset({3})))
    while core.stats().decode_steps < 100:
        core.step()
    building, real = 0.0, engine_core.build_step

    def timed(*args: Any) -> Step:
        nonlocal building
        begin = time.perf_counter()
        step = real(*args)
        building += time.perf_counter() - begin
        return step

    engine_core.build_step = timed
    every, own = [], []
    for _ in range(STEPS):
        building, begin = 0.0, time.perf_counter()
        assert len(core.step()) == batch
        seconds = time.perf_counter() - begin
        every.append(seconds * 1e6)
        own.append((seconds - building) * 1e6)
    engine_core.build_step = real
    return statistics.median(every), statistics.median(own)


def main() -> int:
    """Measure and print."""
    missed = False
    for batch, most in LIMITS_US.items():
        every, own = measure(batch)
        missed = missed or every > most
        print(f"batch {batch:3}: {every:6.1f} us a step (limit {most:.0f}), {own:6.1f} us of it without build_step")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
