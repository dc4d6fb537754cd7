"""Structured output: what StructuredOutputsParams ask for, as masks over the vocabulary. The parser is llguidance's.

llguidance rather than xgrammar: both are well kept and as fast as needed here (a mask takes well under a millisecond),
but xgrammar brings torch, transformers and triton, and llguidance nothing.
"""

from __future__ import annotations

import json
import math

from flint_runtime.errors import UsageError
from flint_runtime.free_parts import CallPart, CallRules, Mask, ThinkingPart, ThinkingRules, all_but, allows, only
from flint_runtime.grammar_pool import GrammarPool, Session, check_size
from flint_runtime.grammar_worker import Limits, Vocabulary
from flint_runtime.request import Grammar
from flint_runtime.sampling_params import CallParams, StructuredOutputsParams
from flint_runtime.tokenizer import Tokenizer

CALL, CALL_END = "<tool_call>", "</tool_call>"


def thinking_budget(tokenizer: Tokenizer, vocab_size: int, budget: int) -> Grammar:
    """What ends the thinking part of an answer that starts inside one after so many tokens, and holds for no more."""
    end = tokenizer.thinking_end_id
    assert end is not None, "a thinking part is open, but nothing can end it"
    return ThinkingPart(ThinkingRules(end, None, only((end,), vocab_size)), budget, None)


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
        self._markers = {marker: token for token, marker in tokenizer.markers.items()}
        self._vocab_size, self._thinking_end = vocab_size, tokenizer.thinking_end_id
        self._no_end = all_but(tokenizer.eos_token_ids, vocab_size)
        self._call_rules = _call_rules(tokenizer, self._markers, vocab_size)
        self._pool = GrammarPool(
            Vocabulary(
                tokenizer.to_json(),
                [tokenizer.token_bytes(token) for token in range(vocab_size)],
                [t for t in range(vocab_size) if tokenizer.is_special(t) or t in self._markers.values()],
                list(tokenizer.eos_token_ids),
            ),
            limits,
        )

    def _thinking_rules(self, calls: CallParams | None) -> ThinkingRules | None:
        """What holds in the thinking part before a text that must match, or with calls; None: there is no such part."""
        end = self._thinking_end
        if end is None:
            return None
        only_end = only((end,), self._vocab_size)
        if calls is None:
            return ThinkingRules(end, self._no_end, only_end)
        # A call that begins before the end of the thinking part ends it: so the parser of answers has it.
        return ThinkingRules(end, None if calls.free else self._no_end, only_end, frozenset((self._markers[CALL],)))

    def compile(self, params: StructuredOutputsParams, thinking: bool = False, budget: int | None = None) -> Grammar:
        """A grammar in its first state.

        Args:
            thinking: the answer starts inside a thinking part, which is free; the grammar holds for what follows it.
            budget: thinking tokens after which that part is ended.
        Raises:
            UsageError: the schema, expression or grammar is wrong, matches nothing, takes too much, or has what
                llguidance has not.
            ResourceError: processes cannot be started.
        """
        calls, call_rules = params.calls, self._call_rules
        if calls is not None and call_rules is None:
            raise UsageError(f"Calls need the tokens {CALL} and {CALL_END}; this checkpoint's tokenizer has none.")
        text = ParsedText(self._pool.open(*_source(params)))
        behind: Grammar = text
        if calls is not None and call_rules is not None:
            behind = CallPart(call_rules, text, free=calls.free, most=calls.most, ends=calls.ends)
        rules = self._thinking_rules(calls) if thinking else None
        return behind if rules is None else ThinkingPart(rules, budget, behind)

    def close(self) -> None:
        """End the processes of the grammars."""
        self._pool.close()


class ParsedText:
    """The state of a text that must match a grammar: `flint_runtime.request.Grammar`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def triggers(self) -> frozenset[int] | None:
        """See `Grammar.triggers`: every token counts."""
        return None

    def wait(self, seconds: float) -> bool:
        """See `Grammar.wait`."""
        return self._session.wait(seconds)

    def mask(self, ahead: int = 0) -> Mask:
        """See `Grammar.mask`. None of the tokens where the parser has given up (`error`).

        Valid until the next `accept`.
        """
        assert not ahead, "what follows depends on every token"
        self._session.wait(math.inf)
        return self._session.mask

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; false if it was not allowed."""
        allowed = allows(self.mask(), token_id)
        if allowed:
            self._session.advance(token_id)
        return allowed

    def restart(self) -> None:
        """Begin to go back to the first state."""
        self._session.restart()

    @property
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may follow, as far as the parser has come."""
        return self._session.wait(0) and self._session.finished

    @property
    def error(self) -> str | None:
        """See `Grammar.error`."""
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
    if params.calls is not None:
        return "calls", params.calls.grammar
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


def _call_rules(tokenizer: Tokenizer, markers: dict[str, int], vocab_size: int) -> CallRules | None:
    """What holds around calls; None where a call has no tokens to begin and end with."""
    start, eos = markers.get(CALL), tokenizer.eos_token_ids
    if start is None or CALL_END not in markers:
        return None
    spaces = frozenset(t for t in range(tokenizer.vocab_size) if (text := tokenizer.token_bytes(t)) and text.isspace())
    others = {*markers.values()} - {start}
    return CallRules(
        start,
        text=all_but(others, vocab_size),
        last_text=all_but({*others, start}, vocab_size),
        must=(only({start, *spaces}, vocab_size), only({start}, vocab_size)),
        may=(only({start, *spaces, *eos}, vocab_size), only({start, *eos}, vocab_size)),
    )
