"""Tokens that a request forbids besides what its grammar does: allowed_token_ids and bad_words, as token masks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flint_plugins.ops import MASK_TOKENS
from flint_runtime.errors import UsageError
from flint_runtime.request import Grammar
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.tokenizer import Tokenizer

Mask = npt.NDArray[np.int32]


class TokenRules:
    """What is the same for every answer of a request: the tokens allowed, and those that complete a bad word."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Check token ids, and tokenise the bad words as vLLM does.

        Raises:
            UsageError: a bad word has no token, or a token id is not in the vocabulary.
        """
        for name in ("allowed_token_ids", "logprob_token_ids"):
            outside = [token for token in getattr(params, name) or () if token >= vocab_size]
            if outside:
                raise UsageError(f"{name} has token ids {outside[:5]} outside the vocabulary of {vocab_size}.")
        self.allowed: Mask | None = None
        """None for every token."""
        if params.allowed_token_ids is not None:
            bits = np.zeros(-(-vocab_size // MASK_TOKENS) * MASK_TOKENS, np.uint8)
            bits[list(params.allowed_token_ids)] = 1
            self.allowed = np.packbits(bits, bitorder="little").view(np.int32)
        self.completions: dict[tuple[int, ...], set[int]] = {}
        """By the tokens before: those that would complete a bad word."""
        for word in params.bad_words:
            for *before, last in _spellings(word, tokenizer):
                self.completions.setdefault(tuple(before), set()).add(last)
        self.lengths = sorted({len(before) for before in self.completions})
        self._words = -(-vocab_size // MASK_TOKENS)

    def answer(self, grammar: Grammar | None = None) -> Grammar | None:
        """The rules at the start of an answer, which may have to match a grammar besides; None for no rule at all."""
        if self.allowed is None and not self.completions:
            return grammar
        return _RestrictedAnswer(self, grammar)

    def mask(self, drawn: list[int], mask: Mask | None) -> Mask:
        """The tokens allowed behind those drawn, [V / 32], of those that another mask allows."""
        if mask is None:
            found = np.full(self._words, -1, np.int32) if self.allowed is None else self.allowed.copy()
        else:
            found = mask.copy() if self.allowed is None else mask & self.allowed
        words = found.view(np.uint32)
        for length in self.lengths:
            if length <= len(drawn):
                for token in self.completions.get(tuple(drawn[len(drawn) - length :]), ()):
                    words[token // MASK_TOKENS] &= np.uint32(0xFFFFFFFF ^ 1 << token % MASK_TOKENS)
        return found


class _RestrictedAnswer:
    """The state of one answer: `flint_runtime.request.Grammar`."""

    def __init__(self, rules: TokenRules, grammar: Grammar | None) -> None:
        self._rules, self._grammar = rules, grammar
        self._drawn: list[int] = []
        self._free: tuple[Mask | None, Mask] | None = None
        """The grammar's mask in a free part, and what is left of it."""

    @property
    def triggers(self) -> frozenset[int] | None:
        """See `Grammar.triggers`. Any token may be the beginning of a bad word."""
        if self._rules.completions:
            return None
        return frozenset() if self._grammar is None else self._grammar.triggers

    def mask(self, ahead: int = 0) -> Mask:
        """See `Grammar.mask`."""
        inner = None if self._grammar is None else self._grammar.mask(ahead)
        if self.triggers is None:
            return self._rules.mask(self._drawn, inner)
        if self._free is None or self._free[0] is not inner:
            self._free = (inner, self._rules.mask(self._drawn, inner))
        return self._free[1]

    def accept(self, token_id: int) -> bool:
        """See `Grammar.accept`."""
        self._drawn.append(token_id)
        return self._grammar is None or self._grammar.accept(token_id)

    @property
    def finished(self) -> bool:
        """See `Grammar.finished`."""
        return self._grammar is not None and self._grammar.finished

    def wait(self, seconds: float) -> bool:
        """See `Grammar.wait`."""
        return self._grammar is None or self._grammar.wait(seconds)

    @property
    def error(self) -> str | None:
        """See `Grammar.error`."""
        return None if self._grammar is None else self._grammar.error


def _spellings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """A bad word as it is and, if it begins with another token then, behind a space. Raises UsageError."""
    plain = tokenizer.encode(word.lstrip())
    if not plain:
        raise UsageError(f"bad_words must have no text of white space alone, found {word!r}.")
    spaced = tokenizer.encode(" " + word.lstrip())
    # A longer one begins with a token for the space alone: what follows it is the plain one.
    return [plain, spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]
