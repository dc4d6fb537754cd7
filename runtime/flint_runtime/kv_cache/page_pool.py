"""Reference-counted pages with an LRU of those whose content is worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """Hands out page ids.

    A page is referenced (by one sequence or several), or free, or cached: not referenced, but its content may be asked
    for again. Cached pages are taken when there is no free one, the longest unused first.
    """

    def __init__(self, pages: int, evicted: Callable[[int], None]) -> None:
        """
        Args:
            evicted: called with a cached page that is about to get other content.
        """
        self.size = pages
        self.references = [0] * pages
        """By page."""
        self._free = list(reversed(range(pages)))
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._evicted = evicted

    @property
    def available(self) -> int:
        """Pages that `allocate` can give, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody references, with content that is kept."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Pages with one reference each and undefined content; at most `available`."""
        assert count <= self.available
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._kept.remove(page)
                self._evicted(page)
            self.references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Reference pages that are kept once more."""
        for page in pages:
            if not self.references[page]:
                del self._cached[page]
            self.references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a sequence's references. Its last pages are evicted first: the first ones serve more prefixes."""
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                if page in self._kept:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The content of a referenced page is worth keeping."""
        assert self.references[page] > 0
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """The content of a page is not worth keeping after all."""
        self._kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)
