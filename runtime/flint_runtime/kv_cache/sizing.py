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
"""Of the released model a snapshot takes as much memory as pages for 1,382 tokens. A running sequence has up to two (of
its prompt and of what it generated); as many again are for conversations that will be continued."""
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
    """Choose the sizes of the pools.

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
    # token_counts and logit_bias have four bytes per token of the vocabulary, token_mask a bit.
    sequence_bytes = plan.slot_bytes + model.vocab_size * 8 + model.vocab_size // 8
    sequences = max_num_seqs or max(1, min(limits.max_batch, memory // 2 // sequence_bytes))
    left = memory - sequences * sequence_bytes
    pages_fit = left // plan.page_bytes if plan.page_bytes else -(-limits.max_context // PAGE_TOKENS)
    length = max_model_len or min(limits.max_context, pages_fit * PAGE_TOKENS)
    needed = -(-length // PAGE_TOKENS)
    if left < 0 or length < 1 or needed > pages_fit:
        most = max(0, min(limits.max_context, pages_fit * PAGE_TOKENS))
        raise ResourceError(
            f"The KV cache does not fit: {memory / 2**20:,.0f} MiB are left for it. {sequences} running sequences take "
            f"{sequences * sequence_bytes / 2**20:,.0f} MiB, and a context of {max(length, 1)} tokens takes "
            f"{max(needed, 1) * plan.page_bytes / 2**20:,.0f} MiB. Ask for fewer sequences (max_num_seqs) or a shorter "
            f"context (max_model_len; {most} tokens fit now), or free memory on this device."
        )
    snapshots = 0
    if enable_prefix_caching and plan.slot_bytes:
        spare_bytes = min(left // _SNAPSHOT_SHARE, left - needed * plan.page_bytes)
        snapshots = min(_SNAPSHOTS_PER_SEQUENCE * sequences, spare_bytes // plan.slot_bytes)
    pages = 1
    if plan.page_bytes:
        pages = (left - snapshots * plan.slot_bytes) // plan.page_bytes
        if available_bytes is None:  # No more than can be of use, with as much again for prefixes.
            pages = min(pages, 2 * sequences * needed)
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
