"""Results of the GPU benchmark: a JSON file a run, a table and a plot for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Record:
    """One measurement. None: not measured.

    bench: "decode", "prefill", "sample", "load" or "op:<name>". A decode record is one whole token of the whole batch.
    bytes, floor_ms: what must be moved at least, and the time that this (or the arithmetic) takes at the rates that
    the same run measured. kernels: of one step or op, counted in its CUDA graph.
    """

    bench: str
    weights: str
    batch: int
    context: int
    tokens: int
    median_ms: float
    p95_ms: float
    bytes: int | None
    floor_ms: float | None
    kernels: int | None
    note: str = ""

    @property
    def fraction(self) -> float | None:
        """Of the floor that is reached; 1 is the floor itself."""
        return self.floor_ms / self.median_ms if self.floor_ms else None


@dataclass(frozen=True)
class Report:
    """One run on one card."""

    card: str
    driver: str
    commit: str
    date: str
    """Of the run, UTC, YYYYMMDD."""
    floor_tb_s: float
    """Bandwidth that a read-only stream reached in this run."""
    barrier_us: float | None
    records: tuple[Record, ...]

    @property
    def stem(self) -> str:
        """Name of the run's files: card, date, commit."""
        return f"{self.card.lower().replace(' ', '-')}-{self.date}-{self.commit or 'none'}"

    def write(self, folder: Path) -> list[Path]:
        """Write the JSON file and the plot beside it; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        values: dict[str, Any] = asdict(self)
        del values["date"]
        paths = [folder / f"{self.stem}.json", folder / f"{self.stem}.svg"]
        paths[0].write_text(json.dumps(values, indent=1) + "\n")
        paths[1].write_text(plot(self))
        return paths


def line(record: Record) -> str:
    """A record as a line of the table."""
    kernels = f"{record.kernels:4} kernels" if record.kernels else ""
    share = f"{record.fraction:5.0%} of {record.floor_ms:.4g} ms" if record.fraction else ""
    rate = record.tokens / record.median_ms * 1e3
    return (
        f"{record.bench:17} {record.weights:5} batch {record.batch:3} context {record.context:7,} "
        f"tokens {record.tokens:6,}: {record.median_ms:9.4g} ms  p95 {record.p95_ms:9.4g}  {rate:10,.0f} tokens/s  "
        f"{share:20} {kernels:12} {record.note}"
    ).rstrip()


# --- Plot -----------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 460, 380, 60, 48, 48, 16
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


def plot(report: Report) -> str:
    """Latency of a decode step over the context, per batch, against its floor (dashed): SVG, both axes logarithmic.

    A panel per format of weights.
    """
    decode = [record for record in report.records if record.bench == "decode"]
    formats = list(dict.fromkeys(record.weights for record in decode))
    times = [t for record in decode for t in (record.median_ms, record.floor_ms) if t] or [1.0]
    low, high = (10 ** f(math.log10(t)) for f, t in ((math.floor, min(times)), (math.ceil, max(times) * 1.001)))
    contexts = sorted({record.context for record in decode}) or [1]
    panels = [
        _panel([record for record in decode if record.weights == fmt], fmt, i * _WIDTH, contexts, low, high)
        for i, fmt in enumerate(formats)
    ]
    title = (
        f"Decode, {report.card}, commit {report.commit}: solid measured, dashed floor at {report.floor_tb_s:.2f} TB/s"
    )
    width = max(1, len(formats)) * _WIDTH
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" font-family="sans-serif" '
            f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
            _text(width / 2, 18, title, "middle"),
            *panels,
            "</svg>\n",
        ]
    )


def _panel(records: Sequence[Record], title: str, left: int, contexts: list[int], low: float, high: float) -> str:
    def x(context: int) -> float:
        span = math.log(contexts[-1] / contexts[0]) or 1
        share = math.log(context / contexts[0]) / span if len(contexts) > 1 else 0.5
        return left + _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        share = math.log(ms / low) / (math.log(high / low) or 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(left + (_WIDTH + _LEFT) / 2, _TOP - 10, title, "middle")]
    first, last = x(contexts[0]), x(contexts[-1])
    for decade in range(round(math.log10(low)), round(math.log10(high)) + 1):
        for digit in (1, 2, 5):
            ms = digit * 10.0**decade
            if low <= ms <= high:
                parts.append(_path([(first, y(ms)), (last, y(ms))], "#ddd"))
                parts.append(_text(left + _LEFT - 6, y(ms) + 4, f"{ms:g} ms", "end"))
    for context in contexts:
        label = f"{context // 1024}K" if context % 1024 == 0 else f"{context / 1000:g}K"
        parts.append(_text(x(context), _HEIGHT - _BOTTOM + 16, label, "middle"))
    parts.append(_text(left + (_WIDTH + _LEFT) / 2, _HEIGHT - 12, "tokens of context", "middle"))
    for i, batch in enumerate(sorted({record.batch for record in records})):
        colour = _COLOURS[i % len(_COLOURS)]
        mine = sorted((r for r in records if r.batch == batch), key=lambda record: record.context)
        points = [(x(r.context), y(r.median_ms)) for r in mine]
        parts.append(_path(points, colour))
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points]
        parts.append(_path([(x(r.context), y(r.floor_ms)) for r in mine if r.floor_ms], colour, dashed=True))
        parts.append(_text(left + _LEFT + 8, _TOP + 12 + 14 * i, f"batch {batch}", "start", colour))
    return "\n".join(parts)


def _path(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> str:
    places = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'


def _text(px: float, py: float, text: str, anchor: str, colour: str = "black") -> str:
    return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
