"""Parts of an answer in which almost everything is allowed: thinking, and the text around calls.

What is allowed there is the same at every token, until one of a few is drawn: so these grammars need no parser, and the
engine core runs ahead (`Grammar.triggers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MASK_TOKENS
from flint_runtime.request import Grammar

if TYPE_CHECKING:
    from flint_runtime.structured import ParsedText

Mask = npt.NDArray[np.int32]
_MOST_SPACES = 4
"""Tokens of white space in a row where nothing else is free: a small model may otherwise write them for ever."""


def all_but(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """Every token but some, [V / 32]."""
    return _packed(np.setdiff1d(np.arange(vocab_size), list(token_ids)), vocab_size)


def only(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """Some tokens, [V / 32]."""
    return _packed(np.fromiter(token_ids, np.int64), vocab_size)


def _packed(allowed: npt.NDArray[np.int64], vocab_size: int) -> Mask:
    bits = np.zeros(-(-vocab_size // MASK_TOKENS) * MASK_TOKENS, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allows(mask: Mask | None, token_id: int) -> bool:
    """Whether a mask has a token."""
    return mask is None or bool(mask[token_id // MASK_TOKENS] >> token_id % MASK_TOKENS & 1)


@dataclass(frozen=True)
class ThinkingRules:
    """What holds in the thinking part."""

    end: int
    """The token that ends it."""
    free: Mask | None
    """The tokens allowed in it."""
    only_end: Mask
    leaves: frozenset[int] = frozenset()
    """Tokens that end it, too, and belong to what follows: a call that begins before </think>."""


class ThinkingPart:
    """The state of an answer that starts inside a thinking part: `flint_runtime.request.Grammar`."""

    def __init__(self, rules: ThinkingRules, budget: int | None, behind: Grammar | None) -> None:
        """
        Args:
            budget: thinking tokens after which the end is forced.
            behind: what holds for the text that follows; None for nothing.
        """
        self._rules, self._budget, self._behind = rules, budget, behind
        self._count = 0
        self._open = True
        self._triggers = rules.leaves | {rules.end}

    @property
    def triggers(self) -> frozenset[int] | None:
        """See `Grammar.triggers`."""
        if self._open:
            return self._triggers
        return frozenset() if self._behind is None else self._behind.triggers

    def mask(self, ahead: int = 0) -> Mask | None:
        """See `Grammar.mask`. How many tokens were drawn is known before they are."""
        if not self._open:
            return None if self._behind is None else self._behind.mask(ahead)
        spent = self._budget is not None and self._count + ahead >= self._budget
        return self._rules.only_end if spent else self._rules.free

    def accept(self, token_id: int) -> bool:
        """See `Grammar.accept`."""
        if not self._open:
            return self._behind is None or self._behind.accept(token_id)
        if not allows(self.mask(), token_id):
            return False
        self._count += 1
        self._open = token_id not in self._triggers
        if token_id in self._rules.leaves:
            return self._behind is None or self._behind.accept(token_id)
        return True

    @property
    def finished(self) -> bool:
        """See `Grammar.finished`."""
        return not self._open and self._behind is not None and self._behind.finished

    def wait(self, seconds: float) -> bool:
        """See `Grammar.wait`."""
        return self._open or self._behind is None or self._behind.wait(seconds)

    @property
    def error(self) -> str | None:
        """See `Grammar.error`."""
        return None if self._open or self._behind is None else self._behind.error


@dataclass(frozen=True)
class CallRules:
    """What holds around calls: a call is what stands from the token `start` to its own end."""

    start: int
    text: Mask
    """Allowed where a call may begin, but need not, and text may stand."""
    last_text: Mask
    """Allowed where no further call may begin."""
    must: tuple[Mask, Mask]
    """Allowed where a call must begin: white space or a call; once there was enough white space, a call."""
    may: tuple[Mask, Mask]
    """The same where the answer may also end."""


class CallPart:
    """The state of an answer in which calls may or must stand: `flint_runtime.request.Grammar`."""

    def __init__(self, rules: CallRules, call: ParsedText, *, free: bool, most: int | None, ends: bool) -> None:
        """
        Args:
            call: parses a call, from behind its start to its end; again and again.
            free: text may stand around calls, and there need be none; otherwise only calls, and at least one.
            most: calls that there may be; None for any number.
            ends: the answer ends with the last of these.
        """
        self._rules, self._call, self._free, self._most, self._ends = rules, call, free, most, ends
        self._calls = 0
        self._spaces = 0
        self._inside = False
        self._done = False
        self._starts = frozenset((rules.start,))

    def _settle(self) -> None:
        """Leave a call that has come to its end, as far as that is known."""
        if self._inside and self._call.wait(0) and self._call.finished:
            self._inside, self._spaces = False, 0
            self._calls += 1
            if self._may_begin:
                self._call.restart()
            else:
                self._done = self._ends

    @property
    def _may_begin(self) -> bool:
        return self._most is None or self._calls < self._most

    @property
    def triggers(self) -> frozenset[int] | None:
        """See `Grammar.triggers`."""
        self._settle()
        return None if self._inside else self._starts

    def mask(self, ahead: int = 0) -> Mask | None:
        """See `Grammar.mask`."""
        self._settle()
        if self._inside:
            return self._call.mask()
        rules = self._rules
        if not self._may_begin:
            return rules.last_text
        if self._free:
            return rules.text
        enough = self._spaces + ahead >= _MOST_SPACES
        return (rules.may if self._calls else rules.must)[enough]

    def accept(self, token_id: int) -> bool:
        """See `Grammar.accept`."""
        self._settle()
        if self._inside:
            return self._call.accept(token_id)
        if not allows(self.mask(), token_id):
            return False
        self._inside = token_id == self._rules.start
        self._spaces += 1
        return True

    @property
    def finished(self) -> bool:
        """See `Grammar.finished`."""
        self._settle()
        return self._done

    def wait(self, seconds: float) -> bool:
        """See `Grammar.wait`."""
        return not self._inside or self._call.wait(seconds)

    @property
    def error(self) -> str | None:
        """See `Grammar.error`."""
        return self._call.error if self._inside else None
