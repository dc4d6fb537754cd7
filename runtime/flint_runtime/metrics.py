"""What the request layer measures: plain counters and histograms, and one log line per finished request.

Names are vLLM's without its prefix. The core's own figures are `CoreStats`; `Metrics.snapshot` puts both side by side.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from flint_runtime.request import FinishReason

if TYPE_CHECKING:
    from flint_runtime.engine_core import CoreStats

logger = logging.getLogger(__name__)

_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_REQUEST_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass
class Histogram:
    """Counts of observations by upper bound (inclusive); the last count is of what lies above every bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, possibly several times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Of all observations."""
        return sum(self.counts)


@dataclass(frozen=True)
class RequestRecord:
    """What is worth knowing of a finished request, all its n answers together."""

    request_id: str
    finish_reasons: list[str]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_time: float | None
    """Seconds from arrival to its first step; None where it ended before."""
    time_to_first_token: float | None
    """Seconds; None where it ended without a token."""
    duration: float
    """Seconds."""
    errors: list[str]


@dataclass
class Metrics:
    """Of one engine since it was opened. Times are in seconds; one thread writes, any may read."""

    time_to_first_token_seconds: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    inter_token_latency_seconds: Histogram = field(default_factory=lambda: Histogram(_TOKEN_SECONDS))
    request_queue_time_seconds: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    """From arrival to the first step that computes something for the request."""
    e2e_request_latency_seconds: Histogram = field(default_factory=lambda: Histogram(_REQUEST_SECONDS))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    request_success: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    """Finished answers by finish_reason."""

    def finish(self, record: RequestRecord) -> None:
        """Count a finished request and log it: one line of JSON, at INFO; at WARNING if it ended with an error."""
        for reason in record.finish_reasons:
            self.request_success[reason] += 1
        self.prompt_tokens += record.prompt_tokens
        self.e2e_request_latency_seconds.observe(record.duration)
        if record.queue_time is not None:
            self.request_queue_time_seconds.observe(record.queue_time)
        level = logging.WARNING if record.errors else logging.INFO
        if logger.isEnabledFor(level):
            rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(record).items()}
            logger.log(level, json.dumps({"event": "request_finished", **rounded}, ensure_ascii=False))

    def snapshot(self, stats: CoreStats) -> dict[str, Any]:
        """Everything as plain values: histograms as bounds, counts and sum; the core's figures by their names."""
        return {**asdict(self), **asdict(stats)}
