"""ResponseStore: responses that clients may come back to. It never grows beyond its bounds."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

MOST_RESPONSES = 1000
MOST_BYTES = 128 << 20
MOST_SECONDS = 24 * 3600.0


class StoredResponse(NamedTuple):
    """A response that has ended, as bytes: objects would cost many times as much, and be looked at by the collector."""

    body: bytes
    """Its JSON."""
    items: bytes
    """JSON list of the items of the whole conversation, to its end. Every response has all of them, so that it stands
    when those before it go."""

    @property
    def size(self) -> int:
        """Bytes that count."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """The latest responses by id. The oldest go first: at more than `count`, at more than `size` bytes, and when they
    are older than `age` seconds. Thread-safe.
    """

    def __init__(
        self,
        count: int = MOST_RESPONSES,
        size: int = MOST_BYTES,
        age: float = MOST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes, self._most_seconds, self._clock = count, size, age, clock
        self._found: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def size(self) -> int:
        """Bytes of all responses."""
        return self._bytes

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep a response, which has a new id, unless it alone is above the bound."""
        with self._lock:
            if response.size > self._most_bytes:
                return
            self._found[response_id] = (self._clock(), response)
            self._bytes += response.size
            self._tidy()

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, if it is still there."""
        with self._lock:
            self._tidy()
            found = self._found.get(response_id)
            return found[1] if found else None

    def delete(self, response_id: str) -> bool:
        """Forget a response; whether it was there."""
        with self._lock:
            self._tidy()
            if response_id not in self._found:
                return False
            self._remove(response_id)
            return True

    def _tidy(self) -> None:
        oldest_allowed = self._clock() - self._most_seconds
        while self._found:
            response_id, (stored, _) = next(iter(self._found.items()))
            if len(self._found) <= self._most and self._bytes <= self._most_bytes and stored >= oldest_allowed:
                return
            self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        self._bytes -= self._found.pop(response_id)[1].size
