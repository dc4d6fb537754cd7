"""The checkpoint's tokenizer and chat template, and detokenisation of a stream."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from flint_runtime.arguments import text as checked_text
from flint_runtime.chat.messages import Message as Message
from flint_runtime.chat.template import ChatTemplate, TemplateSourceError
from flint_runtime.chat.template import Tool as Tool
from flint_runtime.errors import EngineError, UsageError, shown
from flint_runtime.token_cache import TokenCache
from flint_runtime.tokenizer_files import TokenizerFiles

_CACHED_TEMPLATES = 16
"""Templates that callers brought."""


MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""Tokens that divide an answer into its parts. The same characters spelled by other tokens are text."""
_SHORT_CHARACTERS = 2000
"""Below it a text is encoded within a millisecond, the quickest where no other thread may run."""


class Tokenizer:
    """Text to token ids and back. Thread-safe.

    Attributes:
        eos_token_ids: tokens that end a generation, from generation_config.json.
        defaults: the checkpoint's sampling defaults, from the same file.
        markers: texts of the MARKERS that the vocabulary has, by token id.
        thinking_start_id, thinking_end_id: the tokens <think> and </think>; None where the vocabulary has none.
    """

    def __init__(self, files: Path | TokenizerFiles) -> None:
        """Load the tokenizer's files.

        Args:
            files: the directory that holds tokenizer.json and, where present, tokenizer_config.json,
                chat_template.jinja and generation_config.json; or these files, checked.
        Raises:
            EngineError: a file is missing, damaged, or of a kind that cannot be streamed.
        """
        found = files if isinstance(files, TokenizerFiles) else TokenizerFiles.read(files)
        self._tokenizer = found.tokenizer
        self._cache = TokenCache(found.tokenizer)
        self.defaults, self.eos_token_ids = found.defaults, found.eos_token_ids
        self._special_tokens = found.special_tokens
        try:
            self._template = None if found.template is None else ChatTemplate(found.template, found.special_tokens)
        except TemplateSourceError as error:
            raise EngineError(f"The chat template in {found.source} is not valid: {error}") from None
        self._compile = lru_cache(_CACHED_TEMPLATES)(lambda source: ChatTemplate(source, self._special_tokens))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._longest_token = _longest_token(self._tokenizer)
        self.markers = {i: token.content for i, token in added.items() if token.content in MARKERS}
        self.thinking_start_id: int | None = self._tokenizer.token_to_id("<think>")
        self.thinking_end_id: int | None = self._tokenizer.token_to_id("</think>")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised, none are added."""
        return self._cache.encode(text)

    def least_tokens(self, text: str) -> int:
        """As many tokens a text has at least, by its size alone: no token stands for more bytes than the longest."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest_token) if self._longest_token else 0

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. Raises UsageError where they are no token ids."""
        try:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError):
            raise UsageError(
                f"token_ids must be a list of whole numbers from 0 on, found {shown(token_ids)}."
            ) from None
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; empty for an id outside the vocabulary."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        # The ByteLevel decoder takes a token with any other character (an added one with a space, say) as it is.
        try:
            return bytes(_BYTE_OF_CHARACTER[c] for c in token)
        except KeyError:
            return bytes(token, "utf-8")

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out by default."""
        return token_id in self._special_ids

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside an open thinking part, so that its answer goes on there."""
        for token in reversed(prompt):
            if token == self.thinking_start_id:
                return True
            # A special token starts another part of the conversation.
            if token == self.thinking_end_id or self.is_special(token):
                return False
        return False

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Start detokenising a stream."""
        return TextStream(self, skip_special_tokens)

    def render_chat(
        self,
        /,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation with the checkpoint's chat template, or another; see `ChatTemplate.render`.

        Raises:
            UsageError: there is no template, or it rejects the conversation.
        """
        if chat_template is not None:
            source = checked_text("chat_template", chat_template)
            try:
                template = self._compile(source)
            except TemplateSourceError as error:
                raise UsageError(f"chat_template is not valid: {error}") from None
        elif self._template is None:
            raise UsageError(
                "This checkpoint has no chat template; pass chat_template, or send a plain prompt instead."
            )
        else:
            template = self._template
        return template.render(messages, tools, add_generation_prompt, continue_final_message, **template_kwargs)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a rendered conversation; see `render_chat`."""
        return self.encode(self.render_chat(messages, tools, **template_kwargs))


class TextStream:
    """Turns a stream of token ids into text; a character's bytes are held until it is complete.

    The pieces, `finish` included, concatenate to what `Tokenizer.decode` gives for all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Python replaces what is no UTF-8 as the tokenizers library does: maximal invalid prefixes, one U+FFFD each.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, possibly empty."""
        skip = self._tokenizer.is_special if self._skip else lambda token_id: False
        data = b"".join(self._tokenizer.token_bytes(t) for t in token_ids if not skip(t))
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left of an incomplete character: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def _longest_token(tokenizer: RustTokenizer) -> int:
    """Bytes of the longest token; 0 where a text may have more bytes than its tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return 0
    # In the byte alphabet a token has as many characters as bytes. Added ones are written as they are.
    return max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
