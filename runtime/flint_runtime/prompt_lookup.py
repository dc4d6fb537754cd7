"""Prompt lookup: drafts for speculative decoding from a request's own tokens, without a draft model.

Where the last n tokens occurred before, what followed them then is proposed again (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

_NGRAMS = (4, 3, 2)
"""Lengths that are looked up, best first: a longer match is followed by the same tokens more often."""
_MOST_TOKENS = 32_768
"""Of a prompt, its end; the rest is not indexed. That takes 1 µs a token on the thread that serves everyone, and
running streams must not notice."""


class PromptLookup:
    """The tokens of one request, indexed as they come: O(1) per token on average."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        # By length: n-gram -> position of the token that followed its latest occurrence.
        self._follower: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in _NGRAMS}
        self.extend(tokens[-_MOST_TOKENS:])

    def extend(self, tokens: Iterable[int]) -> None:
        """Append the request's next tokens."""
        known, every = len(self._tokens), self._tokens
        every += tokens
        for n, follower in self._follower.items():
            # The n-gram in front of every new token; the last n tokens have no follower yet.
            first = max(known - n, 0)
            last = max(len(every) - n, first)
            columns = (every[first + i : last + i] for i in range(n))
            follower.update(zip(zip(*columns, strict=True), count(first + n)))

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that may follow; empty where the end of the text is new.

        A match that overlaps the end of the text continues with its own copy, so a period repeats.
        """
        tokens = self._tokens
        for n, follower in self._follower.items():
            start = follower.get(tuple(tokens[-n:])) if len(tokens) > n else None
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(most)]
        return []
