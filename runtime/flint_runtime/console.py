"""What both command lines show a person: progress bars, tables, text. Results go to stdout, all else to stderr.

Much of it comes from strangers: paths, names in files, a model's answers. So nothing here reads markup in a text, and
what does not print is escaped.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from rich.text import Text

from flint_runtime.errors import printable


class _PlainConsole(Console):
    """A console that takes every text as it is, a line at a time."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every text comes through here, those in tables, too."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the boundary; rich would end the process with 1."""
        raise BrokenPipeError


out = _PlainConsole()
err = _PlainConsole(stderr=True)

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
            every = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn())
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
            err.print(f"{self._label}: {share}")

    def close(self) -> None:
        """End the bar, or print the last plain line unless nothing was done."""
        if self._bar:
            self._bar.stop()
        elif self._done:
            seconds = time.monotonic() - self._started
            err.print(f"{self._label}: {self._shown(self._done)} in {seconds:.1f} s")


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


def print_json(report: dict[str, Any]) -> None:
    """Print the one report of --json, in ASCII, which every locale has."""
    print(json.dumps(report, indent=1))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def stream(text: str) -> None:
    """Print a piece of an answer at once, with control characters escaped on a terminal, which would obey them."""
    if sys.stdout is None:  # It was closed before we started.
        return
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda found: printable(found[0]), text)
    print(text, end="", flush=True)
