"""Which prefixes are cached, as a tree of full pages.

A node stands for all tokens from the root to it. Children are found by the hash of a page's tokens, compared in full:
it is the usual chain of page hashes, except that no two prefixes can be taken for one another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from flint_plugins.ops import PAGE_TOKENS

NONE = -1
"""No page, no snapshot."""


class PrefixNode:
    """A prefix that ends with a full page."""

    __slots__ = ("children", "holders", "key", "page", "parent", "snapshot")

    def __init__(self, parent: PrefixNode | None, key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, PrefixNode] = {}
        self.page = NONE
        """Holds K and V of the prefix's last page in the full layers."""
        self.snapshot = NONE
        """Slot that holds the sliding layers' state behind the prefix."""
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
    """Take a node out of its tree if it stands for nothing, then the same for what was above it."""
    while (
        node is not None
        and node.parent is not None
        and node.page == NONE
        and node.snapshot == NONE
        and not node.holders
        and not node.children
    ):
        del node.parent.children[node.key]
        node = node.parent
