"""S13: a server's memory does not grow with what it has served."""

from __future__ import annotations

from tests.runtime.server.soak import growth


def test_s13_memory_over_mixed_requests() -> None:
    """A leak of 2 KB a request would show: the same requests 20,000 times over may take 20 MB."""
    assert growth(600, 1000) < 4
