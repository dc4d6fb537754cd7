"""From an answer's tokens to its text, piece by piece: whole characters, and no part of a stop text."""

from __future__ import annotations

from flint_runtime.sampling_params import SamplingParams
from flint_runtime.tokenizer import Tokenizer


class StopMatcher:
    """Looks for one text in a stream of characters (Knuth, Morris, Pratt): O(1) per character on average."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters of `text` that the stream ends with: they may become a match."""
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            self._fallback[i] = self._next(self._fallback[i - 1], text[i])

    def feed(self, character: str) -> bool:
        """Advance by a character; true if the stream now ends with the whole text. Not to be used after that."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.text)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)


class Detokenizer:
    """The text of one answer.

    Stop texts count in content only: not in the thinking part, which lasts to `</think>` where the prompt opened it or
    the answer begins with `<think>`, and not before min_tokens. What may become a stop text is held back, and no more.
    The text does not depend on how the tokens are grouped into calls of `add`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, thinking: bool = False) -> None:
        """Start an answer; `thinking` says that the prompt ends inside the thinking part."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(params.skip_special_tokens) if params.detokenize else None
        self._matchers = [StopMatcher(text) for text in params.stop]
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._thinking = thinking
        self._blank = not thinking
        """Whether the answer could still begin with a thinking part."""
        self._held = ""
        self._length = 0
        """Characters of the whole text so far, held ones included."""
        self.marks: list[tuple[int, int]] = []
        """Of each marker token: the offset of its first character in the whole text, and its id. A stop text may have
        cut it off: then it lies, or ends, beyond the text."""
        self.stop_text: str | None = None
        """The stop text that ended the answer."""

    def add(self, token_id: int) -> str:
        """The text that a token completes; where it completes a stop text, `stop_text` is set and the rest dropped."""
        if self._stream is None:
            return ""
        self._tokens += 1
        piece = self._stream.add([token_id])
        self._length += len(piece)
        marker = self._tokenizer.markers.get(token_id)
        # Before it may stand U+FFFD for a character that it broke off. A special token may have no text.
        if marker is not None and piece.endswith(marker):
            self.marks.append((self._length - len(marker), token_id))
        # The tokens of these marks are no content, nor are those before min_tokens: they cannot be in a stop text.
        if token_id == self._tokenizer.thinking_start_id and self._blank:
            self._thinking = True
        content = not self._thinking and self._tokens > self._min_tokens
        if token_id == self._tokenizer.thinking_end_id:
            self._thinking = content = False
        self._blank = self._blank and not piece.strip()
        return self._release(piece) if content else self._pass(piece)

    def finish(self) -> str:
        """What was held back: the start of a stop text that did not come, and U+FFFD for an incomplete character."""
        if self._stream is None:
            return ""
        piece = self._stream.finish()
        return (self._pass(piece) if self._thinking else self._release(piece)) + self._pass("")

    def _pass(self, piece: str) -> str:
        """Everything, held text first; a stop text cannot reach over it."""
        for matcher in self._matchers:
            matcher.matched = 0
        piece, self._held = self._held + piece, ""
        return piece

    def _release(self, piece: str) -> str:
        """Held text and a piece of content, up to a stop text or to what may become one."""
        if not self._matchers:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            found = [m.text for m in self._matchers if m.feed(character)]
            if found:
                self.stop_text = max(found, key=len)
                self._matchers, self._held = [], ""
                return text[: end if self._include_stop else end - len(self.stop_text)]
        # With the stop text included there is nothing to hide.
        keep = 0 if self._include_stop else max(m.matched for m in self._matchers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
