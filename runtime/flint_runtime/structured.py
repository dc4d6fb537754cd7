"""Structured output: what StructuredOutputsParams ask for, as masks over the vocabulary. The parser is llguidance's.

llguidance rather than xgrammar: both are well kept and as fast as needed here (a mask takes well under a millisecond),
but xgrammar brings torch, transformers and triton, and llguidance nothing.
"""

from __future__ import annotations

import json
import math

import numpy as np

from flint_runtime.errors import UsageError
from flint_runtime.grammar_pool import GrammarPool, Mask, Session, check_size
from flint_runtime.grammar_worker import Limits, Vocabulary
from flint_runtime.sampling_params import StructuredOutputsParams
from flint_runtime.tokenizer import Tokenizer


class GrammarCompiler:
    """Compiles grammars over one tokenizer's vocabulary, keeping the latest. Thread-safe.

    Each one lives in a process of its own, with limits (`flint_runtime.grammar_worker`): what a request brings can
    neither end the engine nor hold it up.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: Limits | None = None) -> None:
        """Collect the vocabulary. The process that has it starts with the first grammar: 1 s for 150,000 tokens.

        Args:
            tokenizer: its end-of-sequence ids are what a grammar allows where the text is complete.
            vocab_size: of the model, which may be larger; a token without text is never allowed.
            limits: of each grammar.
        Raises:
            UsageError: the checkpoint has no end-of-sequence id.
        """
        if not tokenizer.eos_token_ids:
            raise UsageError(
                "structured_outputs need an end-of-sequence token; the checkpoint's generation_config.json has no "
                "eos_token_id."
            )
        self._thinking_end = tokenizer.thinking_end_id
        self._free = _all_but(tokenizer.eos_token_ids, vocab_size)
        self._pool = GrammarPool(
            Vocabulary(
                tokenizer.to_json(),
                [tokenizer.token_bytes(token) for token in range(vocab_size)],
                [token for token in range(vocab_size) if tokenizer.is_special(token)],
                list(tokenizer.eos_token_ids),
            ),
            limits,
        )

    def compile(self, params: StructuredOutputsParams, thinking: bool = False) -> MaskedGrammar:
        """A grammar in its first state.

        Args:
            thinking: the answer starts inside a thinking part, which is free; the grammar holds for what follows it.
        Raises:
            UsageError: the schema, expression or grammar is wrong, matches nothing, takes too much, or has what
                llguidance has not.
            ResourceError: processes cannot be started.
        """
        session = self._pool.open(*_source(params))
        return MaskedGrammar(session, self._free, self._thinking_end if thinking else None)

    def close(self) -> None:
        """End the processes of the grammars."""
        self._pool.close()


class MaskedGrammar:
    """The state of one answer: `flint_runtime.request.Grammar`."""

    def __init__(self, session: Session, free: Mask, thinking_end: int | None) -> None:
        self._session, self._free = session, free
        self._thinking_end = thinking_end
        """The token that ends the thinking part; None behind it."""

    def wait(self, seconds: float) -> bool:
        """See `Grammar`."""
        return self._session.wait(seconds)

    def mask(self) -> Mask:
        """The tokens allowed next, [V / 32]: bit v % 32 of word v / 32. While the model thinks, all but the end.

        None of them where the parser has given up (`error`). Valid until the next `accept`.
        """
        if self._thinking_end is not None:
            return self._free
        self._session.wait(math.inf)
        return self._session.mask

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; false if it was not allowed."""
        allowed = bool(self.mask()[token_id // 32] >> token_id % 32 & 1)
        if self._thinking_end is None:
            if allowed:
                self._session.advance(token_id)
        elif token_id == self._thinking_end:
            self._thinking_end = None
        return allowed

    @property
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may follow, as far as the parser has come."""
        return self._thinking_end is None and self._session.wait(0) and self._session.finished

    @property
    def error(self) -> str | None:
        """See `Grammar`."""
        return self._session.error


def _source(params: StructuredOutputsParams) -> tuple[str, str]:
    """Which of the parameters is given, and its text."""
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else params.json
        if isinstance(schema, str):
            check_size("json", len(schema))
        text = schema if isinstance(schema, str) else _dump(schema)
        return "json", text if params.whitespace_pattern is None else _with_whitespace(text, params.whitespace_pattern)
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        check_size("choice", sum(map(len, params.choice)))
        return "choice", _dump(params.choice)
    assert params.grammar is not None
    return "grammar", params.grammar


def _with_whitespace(schema: str, pattern: str) -> str:
    """A schema that says what may stand between its tokens, in llguidance's own key."""
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"structured_outputs.json is not JSON: {error}") from None
    if isinstance(found, bool):
        found = {} if found else {"not": {}}
    if not isinstance(found, dict):
        raise UsageError(f"structured_outputs.json must be an object, found {type(found).__name__}.")
    given = found.get("x-guidance")
    options = {**(given if isinstance(given, dict) else {}), "whitespace_pattern": pattern}
    return _dump({**found, "x-guidance": options})


def _dump(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"structured_outputs.json is not JSON: {error}") from None


def _all_but(token_ids: tuple[int, ...], vocab_size: int) -> Mask:
    """Every token but some, [V / 32]."""
    allowed = np.ones(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(token_ids)] = 0
    return np.packbits(allowed, bitorder="little").view(np.int32)
