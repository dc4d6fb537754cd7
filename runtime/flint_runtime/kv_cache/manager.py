"""The KV cache manager: places for sequences in both pools, and prefixes that can be used again.

Full layers: a page holds 64 tokens; full pages are shared by every sequence with the same prefix. Sliding layers: a
running sequence has a slot, a ring of its last tokens. That state cannot be shared, as every sequence goes on
overwriting it; so copies of it at page boundaries, the snapshots, lie in spare slots of the same pool. A prefix of n
tokens can be used again where its pages are cached and there is a snapshot at n.

The ring keeps a few tokens more than the window, so the state at boundary n can still be copied when a sequence is
`slack` tokens further: ring - (window - 1), as the query at n sees window - 1 earlier tokens.

Device work is ordered: a page or slot may get a new owner as soon as the steps of the old one are submitted, and
the copies are made in the order of `take_copies`, before the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.kv_cache.page_pool import PagePool
from flint_runtime.kv_cache.prefix_tree import NONE, PrefixNode, page_key, prune
from flint_runtime.kv_cache.sizing import KVCacheConfig


class BlockTable:
    """One sequence's place in the pools."""

    __slots__ = ("cached_tokens", "node", "num_registered", "pages", "rolling", "shared_tokens", "slot")

    def __init__(self, slot: int, pages: list[int], node: PrefixNode) -> None:
        self.slot = slot
        """Of the sliding pool, and of the sampling states."""
        self.pages = pages
        """In order of the tokens they hold."""
        self.node = node
        """The prefix of the full pages that are registered."""
        self.num_registered = 0
        self.cached_tokens = 0
        """Tokens whose K and V were there already."""
        self.shared_tokens = 0
        """Tokens whose pages were there; more than cached_tokens where a snapshot was missing."""
        self.rolling: PrefixNode | None = None
        """Where the latest snapshot of generated tokens is: the next one takes its place."""


@dataclass(frozen=True)
class KVCacheGauges:
    """What is where. Used + cached + free is all, for pages and for snapshots."""

    pages: int
    pages_used: int
    pages_cached: int
    slots: int
    """For sequences."""
    slots_used: int
    snapshots: int
    """Slots for snapshots."""
    snapshots_used: int

    @property
    def pages_free(self) -> int:
        """Pages without content."""
        return self.pages - self.pages_used - self.pages_cached


class KVCacheManager:
    """Gives and takes pages and slots."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.slack = config.ring_tokens - (config.sliding_window - 1)
        """How many tokens after a boundary the state there can still be copied."""
        self.pool = PagePool(config.num_pages if config.has_full_layers else 0, self._page_evicted)
        self.releases = 0
        """Counts what may make room: while it stands still, what did not fit does not fit."""
        self._root = PrefixNode(None, b"")
        self._node_of: dict[int, PrefixNode] = {}
        self._slots = list(reversed(range(config.max_num_seqs)))
        self._spare = list(reversed(range(config.max_num_seqs, config.num_slots)))
        self._snapshots: OrderedDict[int, PrefixNode] = OrderedDict()
        """In order of their last use."""
        self._rolling = 0
        self._copies: list[tuple[int, int]] = []
        width = max(1, self.num_pages(config.max_model_len))
        self._page_table = np.zeros((config.max_num_seqs, width), np.int32)

    def num_pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // PAGE_TOKENS) if self.config.has_full_layers else 0

    def gauges(self) -> KVCacheGauges:
        """The state of every pool."""
        pool, config = self.pool, self.config
        return KVCacheGauges(
            pages=pool.size,
            pages_used=pool.size - pool.available,
            pages_cached=pool.cached,
            slots=config.max_num_seqs,
            slots_used=config.max_num_seqs - len(self._slots),
            snapshots=config.num_slots - config.max_num_seqs,
            snapshots_used=len(self._snapshots),
        )

    # --- Sequences ------------------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], *, reuse: bool, headroom: int) -> BlockTable | None:
        """A place for a sequence of these tokens, its longest usable prefix restored; None where there is no room.

        Args:
            reuse: whether cached prefixes may be used. At least the last token is left to compute.
            headroom: pages that must be left.
        """
        if not self._slots:
            return None
        node, cached, shared = self._match(tokens) if reuse else (self._root, 0, 0)
        pages: list[int] = []
        step: PrefixNode | None = node
        while self.config.has_full_layers and step is not None and step.parent is not None:
            pages.append(step.page)
            step = step.parent
        pages.reverse()
        missing = self.num_pages(len(tokens)) - len(pages)
        unreferenced = sum(not self.pool.references[page] for page in pages)
        if missing + headroom > self.pool.available - unreferenced:
            return None
        self.pool.share(pages)
        table = BlockTable(self._slots.pop(), pages, node)
        node.holders += 1
        table.num_registered = cached // PAGE_TOKENS
        table.cached_tokens, table.shared_tokens = cached, shared
        if node.snapshot != NONE:
            self._copies.append((node.snapshot, table.slot))
            self._snapshots.move_to_end(node.snapshot)
        self._page_table[table.slot, : len(pages)] = pages
        self._extend(table, missing)
        return table

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` tokens in all. False, and nothing changed, where there are no pages."""
        missing = self.num_pages(tokens) - len(table.pages)
        if missing > self.pool.available:
            return False
        if missing > 0:
            self._extend(table, missing)
        return True

    def close(self, table: BlockTable) -> None:
        """Give a place back. What was registered stays cached."""
        self.pool.release(table.pages)
        self._drop_rolling(table)
        table.node.holders -= 1
        prune(table.node)
        self._slots.append(table.slot)
        self.releases += 1

    def forget(self, table: BlockTable, *, found: bool) -> None:
        """What a sequence computed must not be used again.

        Args:
            found: nor anything else that is cached of its prefix, whoever computed it.
        """
        own = set(table.pages)
        node = table.node
        for _ in range(table.num_registered - (0 if found else table.cached_tokens // PAGE_TOKENS)):
            self._drop_snapshot(node)
            if node.page in own or (found and node.page != NONE):
                self.pool.forget(node.page)
                del self._node_of[node.page]
                node.page = NONE
            assert node.parent is not None
            node = node.parent

    def page_table(self, tables: Sequence[BlockTable]) -> npt.NDArray[np.int32]:
        """Pages of each, [B, P] with P the most of any; what lies behind a sequence's last page means nothing."""
        width = max([1, *[len(table.pages) for table in tables]])
        return self._page_table[[table.slot for table in tables], :width]

    def take_copies(self) -> list[tuple[int, int]]:
        """Slots to copy (from, to) before the next step, one after the other."""
        copies, self._copies = self._copies, []
        return copies

    # --- Prefixes -------------------------------------------------------------------------------------------------

    def register(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Let others share the full pages among the first `computed` tokens, which submitted steps compute."""
        if not self.config.enable_prefix_caching:
            return
        for index in range(table.num_registered, computed // PAGE_TOKENS):
            node = table.node.child(page_key(tokens, index))
            node.holders += 1
            table.node.holders -= 1
            table.node = node
            table.num_registered = index + 1
            if node.page == NONE and self.config.has_full_layers:
                page = table.pages[index]
                node.page = page
                self._node_of[page] = node
                self.pool.keep(page)

    def snapshot(self, table: BlockTable, boundary: int, *, rolling: bool) -> None:
        """Copy a sequence's sliding state at a page boundary that is registered and not more than `slack` behind.

        Args:
            rolling: the copy takes the place of the sequence's previous one of this kind. Only half of the spare slots
                hold such copies of running sequences: they must not displace the prompts that others come back to.
        """
        spare = self.config.num_slots - self.config.max_num_seqs
        node = table.node
        for _ in range(table.num_registered - boundary // PAGE_TOKENS):
            assert node.parent is not None
            node = node.parent
        if not spare or node.parent is None or (self.config.has_full_layers and node.page == NONE):
            return
        if node.snapshot != NONE:
            self._snapshots.move_to_end(node.snapshot)
            return
        if rolling:
            if table.rolling is not None:
                self._drop_snapshot(table.rolling)
                prune(table.rolling)
            elif 2 * self._rolling >= spare:
                return
            else:
                self._rolling += 1
            table.rolling = node
        if not self._spare:
            oldest = next(iter(self._snapshots.values()))
            self._drop_snapshot(oldest)
            prune(oldest)
        slot = self._spare.pop()
        node.snapshot = slot
        self._snapshots[slot] = node
        self._copies.append((table.slot, slot))

    def _match(self, tokens: Sequence[int]) -> tuple[PrefixNode, int, int]:
        """The longest usable prefix, its length, and the length of the longest whose pages are cached."""
        node, best, cached = self._root, self._root, 0
        full, sliding = self.config.has_full_layers, self.config.has_sliding_layers
        shared = 0
        for index in range((len(tokens) - 1) // PAGE_TOKENS):
            child = node.children.get(page_key(tokens, index))
            if child is None or (full and child.page == NONE):
                break
            node, shared = child, (index + 1) * PAGE_TOKENS
            if node.snapshot != NONE or not sliding:
                best, cached = node, shared
        return best, cached, shared

    def _extend(self, table: BlockTable, count: int) -> None:
        first = len(table.pages)
        table.pages += self.pool.allocate(count)
        self._page_table[table.slot, first : first + count] = table.pages[first:]

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if node.snapshot != NONE:
            del self._snapshots[node.snapshot]
            self._spare.append(node.snapshot)
            node.snapshot = NONE

    def _drop_rolling(self, table: BlockTable) -> None:
        """The latest snapshot of a sequence that ends is one like any other."""
        if table.rolling is not None:
            table.rolling = None
            self._rolling -= 1

    def _page_evicted(self, page: int) -> None:
        node = self._node_of.pop(page)
        node.page = NONE
        # Without the page it is of no use.
        self._drop_snapshot(node)
        prune(node)
