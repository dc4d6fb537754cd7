"""What both command lines show a person: progress bars, tables, errors. Results go to stdout, all else to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from flint_runtime.errors import FlintError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_PLAIN_INTERVAL_S = 5.0


class CountProgress:
    """Progress over a known number of things: a bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, label: str, total: int, columns: Sequence[ProgressColumn], shown: Callable[[int], str]) -> None:
        """Start it.

        Args:
            columns: of the bar, besides the label, the bar itself and the time that is left.
            shown: how a count is written in a plain line.
        """
        self._label, self._total, self._done, self._shown = label, max(total, 1), 0, shown
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None
        if err.is_terminal:
            every = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
            self._bar = Progress(*every, console=err)
            self._task = self._bar.add_task(label, total=self._total)
            self._bar.start()

    def advance(self, count: int) -> None:
        """Count `count` more. May be called from several threads."""
        self._done += count
        if self._bar:
            self._bar.advance(self._task, count)
        elif time.monotonic() - self._printed > _PLAIN_INTERVAL_S:
            self._printed = time.monotonic()
            share = f"{self._done / self._total:.0%} of {self._shown(self._total)}"
            err.print(f"{self._label}: {share}", markup=False)

    def close(self) -> None:
        """End the bar, or print the last plain line."""
        if self._bar:
            self._bar.stop()
        else:
            seconds = time.monotonic() - self._started
            err.print(f"{self._label}: {self._shown(self._done)} in {seconds:.1f} s", markup=False)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[CountProgress]:
    """Progress over bytes, closed at the end of the block."""
    progress = CountProgress(label, total, (DownloadColumn(), TransferSpeedColumn()), format_bytes)
    try:
        yield progress
    finally:
        progress.close()


@contextmanager
def count_progress(label: str, total: int, unit: str) -> Iterator[CountProgress]:
    """Progress over `total` things called `unit`, closed at the end of the block."""
    progress = CountProgress(label, total, (MofNCompleteColumn(),), lambda count: f"{count:,} {unit}")
    try:
        yield progress
    finally:
        progress.close()


def format_bytes(count: float) -> str:
    """Human-readable size with decimal units: 22.2 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def fail(error: FlintError) -> NoReturn:
    """Print an error as one paragraph and leave with its exit code."""
    err.print(f"error: {error}", markup=False, style="red" if err.is_terminal else None)
    sys.exit(error.exit_code)
