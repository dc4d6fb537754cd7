"""How many pages and slots there are: from the memory at hand and the limits asked."""

from __future__ import annotations

from dataclasses import dataclass

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.config import ModelConfig
from flint_runtime.errors import ResourceError, UsageError
from flint_runtime.manifest import Limits, ring_tokens
from flint_runtime.memory import MemoryPlan

_HOST_BYTES = 2 << 30
"""For KV where an executor knows no limit: the reference executor on a CPU."""
_SNAPSHOTS_PER_SEQUENCE = 4
"""Of the released model a snapshot takes as much memory as pages for 1,480 tokens. A request leaves up to two (of its
prompt and of its answer); as many again are for conversations that will be continued."""
_SNAPSHOT_SHARE = 4
"""Snapshots get at most this part of the memory that is left: without pages they are of no use."""


@dataclass(frozen=True)
class KVCacheConfig:
    """Sizes of the pools, in pages, slots and tokens."""

    num_pages: int
    max_num_seqs: int
    """Sequences that run at once; each has a slot, the first ones of the pool."""
    num_slots: int
    """Of the sliding pool; the rest is for snapshots."""
    max_model_len: int
    """Prompt and answer of one sequence; the pages hold at least one such."""
    sliding_window: int
    ring_tokens: int
    has_full_layers: bool
    has_sliding_layers: bool
    enable_prefix_caching: bool


def choose_kv_cache(
    model: ModelConfig,
    limits: Limits,
    available_bytes: int | None,
    *,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = True,
) -> KVCacheConfig:
    """Choose the sizes of the pools: all of the memory, as far as a tensor of that size may be.

    Args:
        available_bytes: memory for all states; None for as much as a small host has.
        max_num_seqs: None for the engine's batch, or fewer where their slots would take more than half of the memory.
        max_model_len: None for the engine's context, or less where its pages do not fit.
    Raises:
        UsageError: a limit exceeds the engine's.
        ResourceError: what was asked does not fit.
    """
    for name, asked, most, option in (
        ("max_num_seqs", max_num_seqs, limits.max_batch, "--max-batch"),
        ("max_model_len", max_model_len, limits.max_context, "--max-context"),
    ):
        if asked is not None and not 1 <= asked <= most:
            raise UsageError(
                f"{name} must be from 1 to {most}, what this engine was built for; found {asked}. "
                f"Ask for less, or build the engine with a larger {option}."
            )
    plan = MemoryPlan(model, 0, limits)
    memory = _HOST_BYTES if available_bytes is None else available_bytes
    sequence_bytes = plan.slot_bytes + plan.sample_slot_bytes
    sequences = max_num_seqs or max(1, min(limits.max_batch, memory // 2 // sequence_bytes))
    left = memory - sequences * sequence_bytes
    needed = -(-max_model_len // PAGE_TOKENS) if max_model_len else 1
    if left < 0 or needed * plan.page_bytes > left:
        most = min(limits.max_context, max(0, left) // plan.page_bytes * PAGE_TOKENS) if plan.page_bytes else 0
        raise ResourceError(
            f"The KV cache does not fit: {memory / 2**20:,.0f} MiB are left for it. {sequences} running sequences take "
            f"{sequences * sequence_bytes / 2**20:,.0f} MiB, and a context of {max_model_len or PAGE_TOKENS} tokens "
            f"takes {needed * plan.page_bytes / 2**20:,.0f} MiB. Ask for fewer sequences (max_num_seqs) or a shorter "
            f"context (max_model_len; {most} tokens fit now), or free memory on this device."
        )
    snapshots = 0
    if enable_prefix_caching and plan.slot_bytes:
        spare_bytes = min(left // _SNAPSHOT_SHARE, left - needed * plan.page_bytes)
        most = max(0, plan.most_slots - sequences)
        snapshots = min(_SNAPSHOTS_PER_SEQUENCE * sequences, spare_bytes // plan.slot_bytes, most)
    pages, length = 1, max_model_len or limits.max_context
    if plan.page_bytes:
        pages = min(plan.most_pages, (left - snapshots * plan.slot_bytes) // plan.page_bytes)
        length = max_model_len or min(limits.max_context, pages * PAGE_TOKENS)
        if available_bytes is None:  # No more than can be of use, with as much again for prefixes.
            pages = min(pages, 2 * sequences * -(-length // PAGE_TOKENS))
    return KVCacheConfig(
        num_pages=pages,
        max_num_seqs=sequences,
        num_slots=sequences + snapshots,
        max_model_len=length,
        sliding_window=model.sliding_window,
        ring_tokens=ring_tokens(model.sliding_window),
        has_full_layers=bool(model.full_layers),
        has_sliding_layers=bool(model.sliding_layers),
        enable_prefix_caching=enable_prefix_caching,
    )
