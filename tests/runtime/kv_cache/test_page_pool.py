"""Pages: references, the LRU, and what is said of evictions."""

from __future__ import annotations

from flint_runtime.kv_cache.page_pool import PagePool


def test_pages_go_round() -> None:
    pool = PagePool(3, evicted=lambda page: None)
    pages = pool.allocate(3)
    assert sorted(pages) == [0, 1, 2] and pool.available == 0
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.available == 2 and pool.references[pages[0]] == 1
    pool.release(pages[:1])
    assert pool.available == 3 and pool.cached == 0


def test_free_pages_go_before_cached_ones_and_old_ones_before_new_ones() -> None:
    evicted: list[int] = []
    pool = PagePool(6, evicted.append)
    first, second = pool.allocate(2), pool.allocate(2)
    for page in (*first, *second):
        pool.keep(page)
    pool.release(first)
    pool.release(second)
    assert (pool.available, pool.cached) == (6, 4)
    pool.allocate(2)
    assert evicted == []
    # Of a sequence, its end goes first.
    assert pool.allocate(3) == evicted == [first[1], first[0], second[1]]


def test_use_makes_a_page_new_again() -> None:
    evicted: list[int] = []
    pool = PagePool(2, evicted.append)
    a, b = pool.allocate(2)
    for page in (a, b):
        pool.keep(page)
        pool.release([page])
    pool.share([a])
    assert pool.available == 1
    pool.release([a])
    pool.allocate(1)
    assert evicted == [b]


def test_what_is_forgotten_is_free() -> None:
    evicted: list[int] = []
    pool = PagePool(2, evicted.append)
    pages = pool.allocate(2)
    for page in pages:
        pool.keep(page)
    pool.release(pages[:1])
    for page in pages:
        pool.forget(page)
    pool.release(pages[1:])
    pool.allocate(2)
    assert evicted == []
