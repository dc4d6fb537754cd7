"""The KV cache manager: which prefixes can be used again, and what is copied for it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flint_runtime.kv_cache import BlockTable, KVCacheConfig, KVCacheManager

SIZES = KVCacheConfig(
    num_pages=8,
    max_num_seqs=2,
    num_slots=4,
    max_model_len=512,
    sliding_window=33,
    ring_tokens=48,
    has_full_layers=True,
    has_sliding_layers=True,
    enable_prefix_caching=True,
)
WIDE = replace(SIZES, num_pages=16, num_slots=8, sliding_window=200, ring_tokens=272)
"""A ring of several pages."""
TOKENS = list(range(1000, 1300))


def open_table(kv: KVCacheManager, tokens: list[int] = TOKENS, *, reuse: bool = True) -> BlockTable:
    """A place that there must be."""
    table = kv.open(tokens, reuse=reuse, headroom=0)
    assert table is not None
    return table


def leave(kv: KVCacheManager, tokens: list[int], snapshots: list[int]) -> list[int]:
    """A sequence that comes, keeps snapshots at these boundaries, and goes; the slots of the snapshots."""
    table = open_table(kv, tokens, reuse=False)
    kv.register(table, tokens, len(tokens))
    for boundary in snapshots:
        assert kv.snapshot(table, boundary, written=boundary)
    kv.close(table)
    copies = kv.take_copies()
    assert [source for source, _ in copies] == [table.slot] * len(snapshots)
    return [target for _, target in copies]


def test_a_prefix_needs_pages_and_a_snapshot() -> None:
    kv = KVCacheManager(SIZES)
    table = open_table(kv)
    assert (table.cached_tokens, table.pages, kv.take_copies()) == (0, kv.page_table([table])[0].tolist(), [])
    kv.close(table)
    (slot,) = leave(kv, TOKENS, [128])
    table = open_table(kv)
    assert (table.cached_tokens, table.shared_tokens) == (128, 256)
    assert kv.take_copies() == [(slot, table.slot)]
    assert kv.gauges().pages_used == 5 and kv.gauges().slots_used == 1 and kv.gauges().snapshots_used == 1
    # A second one shares the first two pages and has three of its own.
    other = open_table(kv)
    assert other.pages[:2] == table.pages[:2] and not set(other.pages[2:]) & set(table.pages)
    assert kv.gauges().pages_used == 8 and kv.gauges().pages_free == kv.gauges().pages_cached == 0


def test_the_last_token_is_left_to_compute() -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [64, 128])
    assert [open_table(kv, TOKENS[:n]).cached_tokens for n in (129, 128)] == [128, 64]


@pytest.mark.parametrize("changed", [0, 63, 127])
def test_every_earlier_token_counts(changed: int) -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [64, 128])
    tokens = list(TOKENS)
    tokens[changed] += 1
    assert open_table(kv, tokens).cached_tokens == changed // 64 * 64


def test_without_sliding_layers_pages_are_enough() -> None:
    kv = KVCacheManager(replace(SIZES, has_sliding_layers=False, num_slots=2))
    leave(kv, TOKENS, [])
    assert open_table(kv).cached_tokens == 256 and kv.take_copies() == []


def test_without_full_layers_a_snapshot_is_enough() -> None:
    kv = KVCacheManager(replace(SIZES, has_full_layers=False))
    leave(kv, TOKENS, [192])
    table = open_table(kv)
    assert table.cached_tokens == 192 and table.pages == [] and kv.gauges().pages == 0


def test_a_full_pool_gives_no_place() -> None:
    kv = KVCacheManager(SIZES)
    first = open_table(kv)
    assert kv.open(TOKENS, reuse=True, headroom=0) is None
    assert kv.open(TOKENS[:190], reuse=True, headroom=1) is None
    assert not kv.grow(first, 64 * 9) and len(first.pages) == 5
    assert kv.grow(first, 64 * 8) and len(first.pages) == 8
    kv.close(first)
    assert kv.gauges().pages_free == 8


def test_cached_pages_make_room() -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [256])
    assert kv.gauges().pages_cached == 4
    open_table(kv, list(range(500)))
    # What is left of the first one's pages is its beginning; its snapshot is of no use any more.
    assert kv.gauges().pages_cached == 0 and kv.gauges().snapshots_used == 0


def test_pages_to_be_shared_are_not_counted_as_room() -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [256])
    blocker = open_table(kv, list(range(200)))
    assert kv.gauges().pages_cached + kv.gauges().pages_free == 4 == kv.gauges().pages_cached
    assert kv.open(TOKENS, reuse=True, headroom=0) is None, "four shared pages, and none left for the fifth"
    kv.close(blocker)
    assert open_table(kv).cached_tokens == 256


def test_the_longest_unused_snapshot_makes_room() -> None:
    kv = KVCacheManager(replace(SIZES, num_pages=20))
    prompts = [[start + i for i in range(70)] for start in (0, 1000, 2000)]
    slots = [leave(kv, tokens, [64])[0] for tokens in prompts[:2]]
    kv.close(open_table(kv, prompts[0]))
    kv.take_copies()
    assert leave(kv, prompts[2], [64]) == [slots[1]]
    assert [open_table(kv, tokens).cached_tokens for tokens in (prompts[0], prompts[1])] == [64, 0]


def keep(kv: KVCacheManager, tokens: list[int], boundary: int, written: int, *, reuse: bool = False) -> bool:
    """A sequence that comes, goes as far as `written`, keeps a snapshot there, and goes; whether it could."""
    table = open_table(kv, tokens, reuse=reuse)
    kv.register(table, tokens, min(written, len(tokens)))
    kept = kv.snapshot(table, boundary, written)
    kv.close(table)
    kv.take_copies()
    return kept


def cached(kv: KVCacheManager, tokens: list[int]) -> int:
    """Tokens that a sequence finds, which goes at once."""
    table = open_table(kv, tokens)
    kv.close(table)
    kv.take_copies()
    return table.cached_tokens


@pytest.mark.parametrize(("window", "ring"), [(33, 48), (33, 112), (200, 272)])
def test_a_ring_holds_what_was_written_last(window: int, ring: int) -> None:
    kv = KVCacheManager(replace(SIZES, sliding_window=window, ring_tokens=ring))
    for boundary, written in itertools.product(range(64, 512, 64), range(512)):
        seen, there = range(max(0, boundary - window + 1), boundary), range(max(0, written - ring), written)
        if written >= boundary:
            assert kv.holds(written, boundary) == (seen[0] in there)


def test_what_no_ring_has_overwritten_serves_every_shorter_prefix() -> None:
    kv = KVCacheManager(WIDE)
    assert keep(kv, TOKENS, 256, 272)
    for parted in (64, 128, 200, 256):
        assert cached(kv, [*TOKENS[:parted], *range(50)]) == parted // 64 * 64
    assert kv.gauges().snapshots_used == 1


@pytest.mark.parametrize(("written", "served"), [(272, [64, 128, 192, 256]), (273, [256]), (329, [256]), (330, [])])
def test_what_a_ring_has_overwritten(written: int, served: list[int]) -> None:
    kv = KVCacheManager(WIDE)
    assert keep(kv, TOKENS, 256, written) == bool(served)
    found = [cached(kv, [*TOKENS[:parted], *range(50)]) for parted in (64, 128, 192, 256)]
    assert found == [length if length in served else 0 for length in (64, 128, 192, 256)]
    assert kv.gauges().snapshots_used == bool(served)


def test_a_ring_holds_no_more_than_what_was_restored() -> None:
    """At 256 with 320 written it has nothing before 48. What was there is not back when it is restored for 260."""
    kv = KVCacheManager(WIDE)
    assert keep(kv, TOKENS, 256, 320)
    table = open_table(kv, [*TOKENS[:256], *range(20)])
    assert (table.cached_tokens, table.oldest) == (256, 48)
    kv.close(table)


def test_a_longer_snapshot_takes_the_place_of_those_that_serve_nothing_else() -> None:
    kv = KVCacheManager(WIDE)
    table = open_table(kv)
    kv.register(table, TOKENS, 300)
    for boundary, written, used in ((64, 64, 1), (128, 140, 1), (256, 272, 1), (192, 272, 1), (256, 329, 1)):
        assert kv.snapshot(table, boundary, written)
        assert kv.gauges().snapshots_used == used
    # Not where an earlier one serves more.
    kv = KVCacheManager(WIDE)
    assert keep(kv, TOKENS, 128, 128) and keep(kv, TOKENS, 256, 329)
    assert kv.gauges().snapshots_used == 2
    assert [cached(kv, [*TOKENS[:parted], *range(50)]) for parted in (64, 192, 256)] == [64, 128, 256]


def test_a_snapshot_outlives_the_end_of_its_prefix() -> None:
    """Where its last pages are evicted it still serves what is left, until nothing is."""
    kv = KVCacheManager(replace(WIDE, num_pages=6, num_slots=4))
    assert keep(kv, TOKENS[:260], 256, 260)
    for taken, left in ((3, 192), (4, 128), (6, 0)):
        kv.close(open_table(kv, [taken] * 64 * taken, reuse=False))
        assert kv.gauges().pages_cached == left // 64
        assert kv.gauges().snapshots_used == (left > 0)
    assert not kv._root.children


def test_of_several_that_serve_the_same_one_is_left() -> None:
    kv = KVCacheManager(replace(WIDE, num_pages=8))
    tails = [[*TOKENS[:128], *[i] * 72] for i in range(2)]
    for tokens in tails:
        assert keep(kv, tokens, 192, 200, reuse=True)
    assert kv.gauges().snapshots_used == 2
    kv.close(open_table(kv, list(range(64 * 6)), reuse=False))
    assert kv.gauges().pages_cached == 2 and kv.gauges().snapshots_used == 1
    assert cached(kv, tails[0]) == 128


def test_misses_are_counted_until_there_is_a_snapshot() -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [64])
    tails = [[*TOKENS[:192], i] for i in range(3)]
    tables = [open_table(kv, tails[0])]
    kv.close(tables[0])
    tables.append(open_table(kv, tails[1]))
    assert [(t.cached_tokens, t.shared_tokens, t.missed_tokens) for t in tables] == [(64, 192, 128), (64, 192, 256)]
    kv.register(tables[1], tails[1], 192)
    assert kv.snapshot(tables[1], 192, 192)
    kv.close(tables[1])
    third = open_table(kv, tails[2])
    assert (third.cached_tokens, third.missed_tokens) == (192, 0)


def test_without_slots_for_snapshots_none_is_kept() -> None:
    kv = KVCacheManager(replace(SIZES, num_slots=2))
    assert not kv.keeps_snapshots and not keep(kv, TOKENS, 64, 64)
    assert cached(kv, TOKENS) == 0 and kv.take_copies() == []


def test_what_is_forgotten_is_not_found() -> None:
    kv = KVCacheManager(SIZES)
    table = open_table(kv)
    kv.register(table, TOKENS, 300)
    kv.snapshot(table, 256, written=256)
    kv.forget(table, found=False)
    kv.close(table)
    gauges = kv.gauges()
    assert (gauges.pages_cached, gauges.pages_free, gauges.snapshots_used) == (0, 8, 0)
    assert open_table(kv).cached_tokens == 0 and not kv._root.children


def test_what_was_found_is_not_forgotten() -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [128])
    table = open_table(kv)
    kv.register(table, TOKENS, 300)
    kv.snapshot(table, 256, written=256)
    kv.forget(table, found=False)
    kv.close(table)
    assert open_table(kv).cached_tokens == 128


def test_what_was_found_is_forgotten_where_it_may_be_wrong() -> None:
    kv = KVCacheManager(SIZES)
    leave(kv, TOKENS, [128])
    table = open_table(kv)
    assert table.cached_tokens == 128
    kv.register(table, TOKENS, 300)
    kv.forget(table, found=True)
    kv.close(table)
    gauges = kv.gauges()
    assert (gauges.pages_cached, gauges.snapshots_used) == (0, 0) and not kv._root.children


def test_nothing_is_kept_without_prefix_caching() -> None:
    kv = KVCacheManager(replace(SIZES, enable_prefix_caching=False, num_slots=2))
    leave(kv, TOKENS, [])
    assert kv.gauges().pages_cached == 0 and open_table(kv).cached_tokens == 0


def test_a_prefix_whose_page_was_evicted_is_not_found() -> None:
    """Although a sequence that computed the same tokens in pages of its own still stands there."""
    kv = KVCacheManager(replace(SIZES, has_sliding_layers=False, num_slots=2))
    first, second = (open_table(kv, TOKENS[:130], reuse=False) for _ in range(2))
    for table in (first, second):
        kv.register(table, TOKENS, 128)
    kv.close(first)
    kv.close(open_table(kv, list(range(300))))
    assert kv.gauges().pages_cached == 0
    assert open_table(kv, TOKENS[:130]).cached_tokens == 0
    kv.close(second)
