"""Running the fuzzer: hands mutants to a worker process, starts another where one ends, and sums up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS, Target, make_seeds
from tests.fuzz.worker import Result, work

_HUNG_SECONDS = 120.0
"""Of the clock, for one mutant: it waits for something that never comes."""
_START_SECONDS = 300.0
_KEPT_FAULTS = 50


@dataclass
class Report:
    """What came of a run."""

    seed: str
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and outcome."""
    faults: list[Result] = field(default_factory=list)
    slowest: Result | None = None
    largest: Result | None = None
    seconds: float = 0.0

    @property
    def mutants(self) -> int:
        return sum(self.counts.values())

    def add(self, result: Result) -> None:
        """Count a mutant."""
        self.counts[result.kind, result.outcome] += 1
        if result.fault and len(self.faults) < _KEPT_FAULTS:
            self.faults.append(result)
        if self.slowest is None or result.seconds > self.slowest.seconds:
            self.slowest = result
        if self.largest is None or result.bytes > self.largest.bytes:
            self.largest = result

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.mutants} mutants, {self.mutants / max(self.seconds, 1e-9):.0f} a second"]
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            found = ", ".join(f"{o} {n}" for (k, o), n in sorted(self.counts.items()) if k == kind)
            lines.append(f"  {kind}: {found}")
        for what, result in (("slowest", self.slowest), ("largest", self.largest)):
            if result:
                lines.append(
                    f"  {what}: mutant {result.index} ({result.kind}), {result.seconds:.2f} s, {result.bytes >> 20} MiB"
                )
        for fault in self.faults:
            lines.append(
                f"\n{fault.kind}: {fault.fault.strip()}\nRepeat: make fuzz SEED={self.seed} ONLY={fault.index}"
            )
        return "\n".join(lines)


def fuzz(
    seed: str, indices: Sequence[int], seconds: float | None = None, kinds: Sequence[type[Target]] = TARGETS
) -> Report:
    """Read mutants, for at most `seconds`.

    Args:
        indices: numbers of the mutants, ascending. A mutant follows from its number and `seed`.
    Raises:
        RuntimeError: the seeds themselves are not accepted.
    """
    report = Report(seed)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None, prefix="fuzz-") as name:
        seeds = make_seeds(Path(name) / "seeds")
        started = time.monotonic()
        starts = 0
        while report.mutants < len(indices) and (seconds is None or time.monotonic() < started + seconds):
            place = Path(name) / f"worker-{starts}"
            starts += 1
            with _Worker(seed, indices[report.mutants :], seeds, place, kinds) as worker:
                if starts == 1:
                    started = time.monotonic()
                worker.collect(report, None if seconds is None else started + seconds)
        report.seconds = time.monotonic() - started
    return report


class _Worker:
    """A worker process at work."""

    def __init__(
        self, seed: str, indices: Sequence[int], seeds: Path, place: Path, kinds: Sequence[type[Target]]
    ) -> None:
        self._indices, self._place, self._kinds = indices, place, kinds
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe(duplex=False)
        arguments: tuple[Any, ...] = (theirs, seed, indices, seeds, place, kinds)
        self._process = context.Process(target=work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Worker:
        if not self._connection.poll(_START_SECONDS) or not self._started():
            raise RuntimeError(f"The seeds are not accepted: {self._last_words()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _started(self) -> bool:
        try:
            return self._connection.recv() is None
        except EOFError:
            return False

    def collect(self, report: Report, until: float | None) -> None:
        """Count mutants until the last one, until a time of the clock, or until the worker has ended."""
        for index in self._indices:
            if until is not None and time.monotonic() > until:
                return
            try:
                if self._connection.poll(_HUNG_SECONDS):
                    report.add(self._connection.recv())
                    continue
                ending = f"It hung for {_HUNG_SECONDS:.0f} s."
            except (EOFError, ConnectionResetError):
                self._process.join()
                ending = f"The process ended with {_code(self._process.exitcode)}."
            kind = self._kinds[index % len(self._kinds)].kind
            report.add(Result(index, kind, "fault", f"{ending}\n{self._last_words()}", 0.0, 0))
            return

    def _last_words(self) -> str:
        path = self._place / "stderr"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def _code(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
