"""The store of responses: what is there, and that it stays within its bounds."""

from __future__ import annotations

import random

from flint_runtime.server.response_store import ResponseStore, StoredResponse


def response(size: int) -> StoredResponse:
    return StoredResponse(b"{}", b"x" * (size - 2))


def test_count() -> None:
    store = ResponseStore(count=3)
    for name in "abcde":
        store.put(name, response(10))
    assert [store.get(name) is not None for name in "abcde"] == [False, False, True, True, True]
    assert len(store) == 3 and store.size == 30


def test_bytes() -> None:
    """What alone is too large drives nothing else out."""
    store = ResponseStore(size=100)
    store.put("a", response(60))
    store.put("b", response(101))
    assert store.get("a") and store.get("b") is None
    store.put("c", response(50))
    assert store.get("a") is None and store.get("c") and store.size == 50


def test_age() -> None:
    now = [0.0]
    store = ResponseStore(age=10, clock=lambda: now[0])
    store.put("a", response(10))
    now[0] = 10.0
    assert store.get("a")
    now[0] = 10.1
    assert store.get("a") is None and not store.delete("a") and len(store) == store.size == 0


def test_delete() -> None:
    store = ResponseStore()
    store.put("a", response(10))
    assert store.delete("a") and not store.delete("a") and store.get("a") is None and store.size == 0


def test_bounds_hold_whatever_comes() -> None:
    rng, now = random.Random(0), [0.0]
    store = ResponseStore(count=20, size=2000, age=50, clock=lambda: now[0])
    for number in range(5000):
        now[0] += rng.random() * 4
        store.put(str(number), response(rng.randrange(2, 400)))
        if rng.random() < 0.2:
            store.delete(str(number - rng.randrange(20)))
        assert len(store) <= 20 and store.size <= 2000
        assert store.size == sum(kept.size for _, kept in store._found.values())
        assert all(when >= now[0] - 50 for when, _ in store._found.values())
