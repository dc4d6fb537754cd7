"""Structured output: what StructuredOutputsParams ask for, as masks over the vocabulary. The parser is llguidance's.

llguidance rather than xgrammar: both are well kept and as fast as needed here (a mask takes well under a millisecond),
but xgrammar brings torch, transformers and triton, and llguidance nothing.
"""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from flint_runtime.errors import UsageError
from flint_runtime.sampling_params import StructuredOutputsParams
from flint_runtime.tokenizer import Tokenizer

Mask = npt.NDArray[np.int32]

_CACHED_GRAMMARS = 128
_WHITESPACE = r"[ \t\r\n]{1,32}"
"""Between the tokens of JSON. Bounded: a small model may otherwise write white space for ever."""


class GrammarCompiler:
    """Compiles grammars over one tokenizer's vocabulary, keeping the latest. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare a vocabulary: 0.2 s for 150,000 tokens.

        Args:
            tokenizer: its end-of-sequence ids are what a grammar allows where the text is complete.
            vocab_size: of the model, which may be larger; a token without text is never allowed.
        Raises:
            UsageError: the checkpoint has no end-of-sequence id.
        """
        if not tokenizer.eos_token_ids:
            raise UsageError(
                "structured_outputs need an end-of-sequence token; the checkpoint's generation_config.json has no "
                "eos_token_id."
            )
        self._thinking_end = tokenizer.thinking_end_id
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)), eos_token=list(tokenizer.eos_token_ids)
        )
        self._free = _all_but(tokenizer.eos_token_ids, vocab_size)
        self._matcher = lru_cache(_CACHED_GRAMMARS)(self._compile)

    def compile(self, params: StructuredOutputsParams, thinking: bool = False) -> MaskedGrammar:
        """A grammar in its first state.

        Args:
            thinking: the answer starts inside a thinking part, which is free; the grammar holds for what follows it.
        Raises:
            UsageError: the schema, expression or grammar is wrong or too large, or has what llguidance has not.
        """
        kind, text = _source(params)
        matcher = self._matcher(kind, text).deep_copy()
        return MaskedGrammar(matcher, self._free, self._thinking_end if thinking else None)

    def _compile(self, kind: str, text: str) -> LLMatcher:
        try:
            if kind == "json":
                source = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
            else:
                source = grammar_from(kind, text)  # type: ignore[arg-type]
            error = LLMatcher.validate_grammar(source, self._vocabulary)
        except ValueError as found:
            error = str(found)
        if error:
            raise UsageError(f"structured_outputs.{kind} cannot be used: {error.strip()}")
        return LLMatcher(self._vocabulary, source, log_level=0)


class MaskedGrammar:
    """The state of one answer: `flint_runtime.request.Grammar`."""

    def __init__(self, matcher: LLMatcher, free: Mask, thinking_end: int | None) -> None:
        self._matcher, self._free = matcher, free
        self._thinking_end = thinking_end
        """The token that ends the thinking part; None behind it."""

    def mask(self) -> Mask:
        """The tokens allowed next, [V / 32]: bit v % 32 of word v / 32. While the model thinks, all but the end.

        None where the parser has given up, as over a text that is too ambiguous: llguidance would let the answer end
        there as if it were complete.
        """
        if self._thinking_end is not None:
            return self._free
        mask = np.empty_like(self._free)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask[:] = 0
        return mask

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; false if it was not allowed."""
        if self._thinking_end is None:
            return self._matcher.consume_token(token_id)
        if token_id == self._thinking_end:
            self._thinking_end = None
        return bool(self._free[token_id // 32] >> token_id % 32 & 1)

    @property
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may follow."""
        return self._thinking_end is None and self._matcher.is_stopped() and not self._matcher.is_error()


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def _source(params: StructuredOutputsParams) -> tuple[str, str]:
    """Which of the parameters is given, and its text."""
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else params.json
        text = schema if isinstance(schema, str) else _dump(schema)
        return "json", text if params.whitespace_pattern is None else _with_whitespace(text, params.whitespace_pattern)
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
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
