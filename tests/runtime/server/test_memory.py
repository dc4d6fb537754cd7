"""S13: a server's memory does not grow with what it has served."""

from __future__ import annotations

from tests.runtime.server.soak import growth


def test_s13_memory_over_mixed_requests() -> None:
    """A leak of some KB a request would show; `python -m tests.runtime.server.soak 20000` shows one of 1 KB."""
    assert growth(300, 500) < 3
