"""The checkpoint's tokenizer and chat template, and detokenisation of a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from flint_runtime.errors import EngineError, UsageError
from flint_runtime.tokenizer_files import TokenizerFiles

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


_SHORT_CHARACTERS = 2000
"""Below it a text is encoded within a millisecond, the quickest where no other thread may run."""


class Tokenizer:
    """Text to token ids and back. Thread-safe.

    Attributes:
        eos_token_ids: tokens that end a generation, from generation_config.json.
        defaults: the checkpoint's sampling defaults, from the same file.
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
        self.defaults, self.eos_token_ids = found.defaults, found.eos_token_ids
        self._special_tokens = found.special_tokens
        self._template = None if found.template is None else _compile(found.template, found.source)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._longest_token = _longest_token(self._tokenizer)
        self.thinking_start_id: int | None = self._tokenizer.token_to_id("<think>")
        self.thinking_end_id: int | None = self._tokenizer.token_to_id("</think>")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised, none are added."""
        if len(text) < _SHORT_CHARACTERS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        # The same, but the other threads, the engine's among them, run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """As many tokens a text has at least, by its size alone: no token stands for more bytes than the longest."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest_token) if self._longest_token else 0

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
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
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation with the checkpoint's chat template, as transformers' apply_chat_template does.

        Raises:
            UsageError: there is no template, or it rejects the conversation.
        """
        if self._template is None:
            raise UsageError("This checkpoint has no chat template; send a plain prompt instead.")
        values = {**self._special_tokens, **template_kwargs}
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"The chat template rejects this conversation: {error}") from None

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a rendered conversation that ends with the generation prompt; see `render_chat`."""
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


class _GenerationTag(Extension):
    """`{% generation %}`, with which transformers marks the assistant's tokens for training: only a scope here."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own name and type)

    def parse(self, parser: Parser) -> Node:
        """Replace the tag by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _compile(template: str, source: str) -> jinja2.Template:
    # Not optimised: jinja would compute constants such as 'x' * 10**12 while it compiles.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], optimized=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except RecursionError:
        raise EngineError(f"The chat template in {source} is not valid: it is nested too deeply") from None
    except Exception as error:  # jinja's own, and Python's about the code that jinja makes of the template
        raise EngineError(f"The chat template in {source} is not valid: {error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
