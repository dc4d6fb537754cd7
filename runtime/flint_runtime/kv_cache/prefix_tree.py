"""Which prefixes are cached, as a tree of full pages.

A node stands for all tokens from the root to it. Children are found by the hash of a page's tokens, compared in full:
it is the usual chain of page hashes, except that no two prefixes can be taken for one another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from flint_plugins.ops import PAGE_TOKENS

NONE = -1
"""No page."""


class Snapshot:
    """A copy of a sequence's sliding state, in a slot of its own."""

    __slots__ = ("first", "node", "slot")

    def __init__(self, slot: int, first: int, node: PrefixNode) -> None:
        self.slot = slot
        self.first = first
        """The first position that it holds."""
        self.node = node
        """The longest prefix that it serves; the shorter ones whose window it holds are found from there upwards."""


class PrefixNode:
    """A prefix that ends with a full page."""

    __slots__ = ("__weakref__", "children", "holders", "key", "length", "missed", "page", "parent", "snapshots")

    def __init__(self, parent: PrefixNode | None, key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.length: int = parent.length + PAGE_TOKENS if parent else 0
        """In tokens."""
        self.children: dict[bytes, PrefixNode] = {}
        self.page = NONE
        """Holds K and V of the prefix's last page in the full layers."""
        self.snapshots: list[Snapshot] = []
        """Those that hold the sliding layers' state behind the prefix, in the order in which they were taken."""
        self.missed = 0
        """Tokens that were computed again because there was no such snapshot, though their pages were cached."""
        self.holders = 0
        """Sequences whose own tokens lead here."""

    def child(self, key: bytes) -> PrefixNode:
        """The node one page on, made if it is not there."""
        node = self.children.get(key)
        if node is None:
            node = self.children[key] = PrefixNode(self, key)
        return node


def page_key(tokens: Sequence[int], page: int) -> bytes:
    """The tokens of a full page, by which a node's child is found."""
    return array("i", tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]).tobytes()


def prune(node: PrefixNode | None) -> None:
    """Take a node out of its tree if it stands for nothing and was not taken out, then the same for those above it."""
    while (
        node is not None
        and node.parent is not None
        and node.page == NONE
        and not node.snapshots
        and not node.holders
        and not node.children
        and node.parent.children.get(node.key) is node
    ):
        del node.parent.children[node.key]
        node = node.parent
