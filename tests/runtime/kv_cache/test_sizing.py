"""Sizes of the pools for the released model and for flint-nano."""

from __future__ import annotations

import pytest

from flint_runtime.errors import ResourceError, UsageError
from flint_runtime.kv_cache import choose_kv_cache
from flint_runtime.manifest import Limits
from flint_runtime.memory import MemoryPlan
from tests.shapes import FLINT, NANO

LIMITS = Limits(max_batch=64, max_context=262_144, prefill_chunk=8192)
GIB = 1 << 30
PLAN = MemoryPlan(FLINT, 0, LIMITS)


@pytest.mark.parametrize("gib", [4, 8, 30, 50])
@pytest.mark.parametrize("caching", [True, False])
def test_memory_is_used_and_not_exceeded(gib: int, caching: bool) -> None:
    sizes = choose_kv_cache(FLINT, LIMITS, gib * GIB, enable_prefix_caching=caching)
    used = (
        sizes.num_pages * PLAN.page_bytes
        + sizes.num_slots * PLAN.slot_bytes
        + sizes.max_num_seqs * PLAN.sample_slot_bytes
    )
    assert gib * GIB - 2 * PLAN.page_bytes < used <= gib * GIB
    assert sizes.num_pages * 64 >= sizes.max_model_len
    assert (sizes.num_slots > sizes.max_num_seqs) == caching or gib == 4
    assert sizes.max_num_seqs == (64 if gib > 4 else 49)


def test_a_large_card_serves_the_whole_context() -> None:
    sizes = choose_kv_cache(FLINT, LIMITS, 100 * GIB)
    assert (sizes.max_model_len, sizes.max_num_seqs, sizes.num_slots) == (262_144, 64, 64 + 256)
    assert sizes.ring_tokens == 592 and sizes.sliding_window == 513
    assert sizes.num_pages * 4 * 2 * 64 * 128 <= 2**31 - 1 < (sizes.num_pages + 1) * 4 * 2 * 64 * 128
    assert choose_kv_cache(FLINT, LIMITS, 1000 * GIB).num_pages == sizes.num_pages == 32_767


def test_a_small_card_serves_a_shorter_context() -> None:
    sizes = choose_kv_cache(FLINT, LIMITS, 6 * GIB, max_num_seqs=4)
    assert sizes.max_model_len == sizes.num_pages * 64 < 262_144
    assert choose_kv_cache(FLINT, LIMITS, 6 * GIB, max_num_seqs=4, max_model_len=100_000).num_slots > 4


def test_what_does_not_fit() -> None:
    with pytest.raises(ResourceError, match=r"2,048 MiB are left.*4 running sequences take.*\(max_num_seqs\).*fit now"):
        choose_kv_cache(FLINT, LIMITS, 2 * GIB, max_num_seqs=4, max_model_len=262_144)
    with pytest.raises(ResourceError, match="64 running sequences take"):
        choose_kv_cache(FLINT, LIMITS, 1 * GIB, max_num_seqs=64)
    with pytest.raises(ResourceError, match="does not fit"):
        choose_kv_cache(FLINT, LIMITS, 0)


@pytest.mark.parametrize(("name", "most"), [("max_num_seqs", 64), ("max_model_len", 262_144)])
def test_the_engine_sets_the_limits(name: str, most: int) -> None:
    for value in (0, most + 1):
        with pytest.raises(UsageError, match=f"{name} must be from 1 to {most}.*found {value}"):
            choose_kv_cache(FLINT, LIMITS, 100 * GIB, **{name: value})  # type: ignore[arg-type]


def test_unknown_memory_takes_no_more_than_is_of_use() -> None:
    sizes = choose_kv_cache(NANO, Limits(max_batch=4, max_context=1024, prefill_chunk=256), None)
    assert (sizes.max_num_seqs, sizes.max_model_len, sizes.num_pages) == (4, 1024, 2 * 4 * 16)
