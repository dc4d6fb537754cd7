"""What both command lines show a person: progress bars, tables, errors. Results go to stdout, all else to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from flint_runtime.errors import FlintError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_PLAIN_INTERVAL_S = 5.0


class ByteProgress:
    """Progress over a known number of bytes: a bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, max(total, 1), 0
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None
        if err.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=err)
            self._task = self._bar.add_task(label, total=self._total)
            self._bar.start()

    def advance(self, count: int) -> None:
        """Count `count` more bytes. May be called from several threads."""
        self._done += count
        if self._bar:
            self._bar.advance(self._task, count)
        elif time.monotonic() - self._printed > _PLAIN_INTERVAL_S:
            self._printed = time.monotonic()
            err.print(f"{self._label}: {self._done / self._total:.0%} of {format_bytes(self._total)}", markup=False)

    def close(self) -> None:
        """End the bar, or print the last plain line."""
        if self._bar:
            self._bar.stop()
        else:
            seconds = time.monotonic() - self._started
            err.print(f"{self._label}: {format_bytes(self._done)} in {seconds:.1f} s", markup=False)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[ByteProgress]:
    """A `ByteProgress` that is closed at the end of the block."""
    progress = ByteProgress(label, total)
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
