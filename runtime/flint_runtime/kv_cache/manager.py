"""The KV cache manager: places for sequences in both pools, and prefixes that can be used again.

Full layers: a page holds 64 tokens; full pages are shared by every sequence with the same prefix. Sliding layers: a
running sequence has a slot, a ring of its last tokens. That state cannot be shared, as every sequence goes on
overwriting it; so copies of it, the snapshots, lie in spare slots of the same pool. A prefix of n tokens can be used
again where its pages are cached and a snapshot holds the window of the token behind it. To compute that window alone
would not be exact: what a sliding layer keeps of a token depends, through the sliding layers before it, on one window
more for each of them.

Which prefixes a snapshot serves follows from the ring: taken when w tokens were written, it holds the last `ring` of
them, and the token at n sees the window - 1 before it.
- As the ring is longer than the window by a page and what one decode step writes, the end of the last full page is
  always among them when a prompt, or an answer, has come to its end.
- While w is at most `ring`, nothing was overwritten yet: one snapshot serves every prefix up to w.

Device work is ordered: a page or slot may get a new owner as soon as the steps of the old one are submitted, and
the copies are made in the order of `take_copies`, before the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.kv_cache.page_pool import PagePool
from flint_runtime.kv_cache.prefix_tree import NONE, PrefixNode, Snapshot, page_key, prune
from flint_runtime.kv_cache.sizing import KVCacheConfig


class BlockTable:
    """One sequence's place in the pools."""

    __slots__ = ("cached_tokens", "missed_tokens", "node", "num_registered", "oldest", "pages", "shared_tokens", "slot")

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
        self.missed_tokens = 0
        """What that has cost so far, in tokens of all sequences whose pages were there up to the same point."""
        self.oldest = 0
        """The first position that its ring holds, unless it was overwritten since."""


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
        self.pool = PagePool(config.num_pages if config.has_full_layers else 0, self._page_evicted)
        self.releases = 0
        """Counts what may make room: while it stands still, what did not fit does not fit."""
        self._root = PrefixNode(None, b"")
        self._salted: WeakValueDictionary[str, PrefixNode] = WeakValueDictionary()
        """More roots, by cache_salt; each lives as long as something of it is cached or used."""
        self._node_of: dict[int, PrefixNode] = {}
        self._slots = list(reversed(range(config.max_num_seqs)))
        self._spare = list(reversed(range(config.max_num_seqs, config.num_slots)))
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        """By slot, in order of their last use."""
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

    def open(self, tokens: Sequence[int], *, reuse: bool, headroom: int, salt: str | None = None) -> BlockTable | None:
        """A place for a sequence of these tokens, its longest usable prefix restored; None where there is no room.

        Args:
            reuse: whether cached prefixes may be used. At least the last token is left to compute.
            headroom: pages that must be left.
            salt: prefixes are shared with those of the same one only.
        """
        if not self._slots:
            return None
        root = self._root_of(salt)
        node, parting = self._match(tokens, root) if reuse else (root, root)
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
        table.num_registered = node.length // PAGE_TOKENS
        table.cached_tokens, table.shared_tokens = node.length, parting.length
        parting.missed += parting.length - node.length
        table.missed_tokens = parting.missed
        if node.snapshots:
            # One of several that are as good, and always the same: the others make room in time.
            snapshot = node.snapshots[-1]
            self._copies.append((snapshot.slot, table.slot))
            self._snapshots.move_to_end(snapshot.slot)
            table.oldest = snapshot.first
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
            for snapshot in tuple(node.snapshots):
                self._drop(snapshot)
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

    def usable(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many of these tokens `open` would find."""
        return self._match(tokens, self._root_of(salt))[0].length

    def holds(self, written: int, boundary: int) -> bool:
        """Whether a ring into which `written` tokens went holds what the token at a boundary sees of those before it.

        True without sliding layers, which are all that this is about.
        """
        return not self.config.has_sliding_layers or self._serves(written - self.config.ring_tokens, boundary)

    def snapshot(self, table: BlockTable, boundary: int, written: int) -> bool:
        """Keep a sequence's sliding state at a page boundary that is registered.

        Args:
            written: tokens that went into its ring, by the steps submitted so far.
        Returns:
            Whether it is kept, by a new copy or an earlier one; not where it is overwritten, or there is no slot.
        """
        node: PrefixNode | None = table.node
        while node is not None and node.length > boundary:
            node = node.parent
        first = max(table.oldest, written - self.config.ring_tokens)
        if node is None or not node.length or not self.keeps_snapshots or not self._serves(first, boundary):
            return False
        if self.config.has_full_layers and node.page == NONE:
            return False
        for snapshot in node.snapshots:
            if snapshot.first <= first:
                self._snapshots.move_to_end(snapshot.slot)
                return True
        served = []
        above: PrefixNode | None = node
        while above is not None and above.length and self._serves(first, above.length):
            served.append(above)
            above = above.parent
        # Those that serve nothing beyond.
        for lesser in [s for one in served for s in one.snapshots if s.node is one and s.first >= first]:
            self._drop(lesser)
        if not self._spare:
            self._drop(next(iter(self._snapshots.values())))
        snapshot = Snapshot(self._spare.pop(), first, node)
        self._snapshots[snapshot.slot] = snapshot
        for one in served:
            one.snapshots.append(snapshot)
        node.missed = 0
        self._copies.append((table.slot, snapshot.slot))
        return True

    @property
    def keeps_snapshots(self) -> bool:
        """Whether there are slots for snapshots."""
        return self.config.num_slots > self.config.max_num_seqs

    def _root_of(self, salt: str | None) -> PrefixNode:
        if salt is None:
            return self._root
        root = self._salted.get(salt)
        if root is None:
            root = self._salted[salt] = PrefixNode(None, b"")
        return root

    def _match(self, tokens: Sequence[int], root: PrefixNode) -> tuple[PrefixNode, PrefixNode]:
        """The longest usable prefix, and the longest whose pages are cached."""
        node = best = root
        full, sliding = self.config.has_full_layers, self.config.has_sliding_layers
        for index in range((len(tokens) - 1) // PAGE_TOKENS):
            child = node.children.get(page_key(tokens, index))
            if child is None or (full and child.page == NONE):
                break
            node = child
            if node.snapshots or not sliding:
                best = node
        return best, node

    def _serves(self, first: int, boundary: int) -> bool:
        """Whether the positions from `first` on are all that the token at a boundary sees of those before it."""
        return max(0, boundary - (self.config.sliding_window - 1)) >= first

    def _extend(self, table: BlockTable, count: int) -> None:
        first = len(table.pages)
        table.pages += self.pool.allocate(count)
        self._page_table[table.slot, first : first + count] = table.pages[first:]

    def _drop(self, snapshot: Snapshot) -> None:
        """Give a snapshot's slot back."""
        del self._snapshots[snapshot.slot]
        self._spare.append(snapshot.slot)
        node: PrefixNode | None = snapshot.node
        while node is not None and snapshot in node.snapshots:
            node.snapshots.remove(snapshot)
            node = node.parent
        prune(snapshot.node)

    def _page_evicted(self, page: int) -> None:
        node = self._node_of.pop(page)
        node.page = NONE
        for snapshot in tuple(node.snapshots):
            if snapshot.node is node:
                self._shorten(snapshot)
        prune(node)

    def _shorten(self, snapshot: Snapshot) -> None:
        """The page of the longest prefix that a snapshot serves is gone: it is left to the next shorter one, if any."""
        node = snapshot.node.parent
        while node is not None and snapshot in node.snapshots and node.page == NONE:
            node = node.parent
        others = [] if node is None else [one for one in node.snapshots if one.first <= snapshot.first]
        if node is None or others != [snapshot]:  # It serves nothing more, or nothing that another one does not.
            self._drop(snapshot)
            return
        gone = snapshot.node
        while gone is not node:
            gone.snapshots.remove(snapshot)
            assert gone.parent is not None
            gone = gone.parent
        snapshot.node = node
