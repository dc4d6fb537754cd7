"""The files that a tokenizer is made from: read and checked by the build, before it takes them, and by the runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as RustTokenizer

from flint_runtime.errors import EngineError, shown
from flint_runtime.sampling_params import generation_defaults
from flint_runtime.small_files import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, json_object, listed, read_small_file, utf8

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
GENERATION = "generation_config.json"

_PROBE = "Hello, 1 é\n"
_T = TypeVar("_T")


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files say.

    Attributes:
        source: where they came from, for messages.
        tokenizer: without truncation and padding, as transformers uses it.
        special_tokens: what templates may print, as in transformers: every *_token of tokenizer_config.json.
        template: source of the chat template; of several named ones, "default".
        defaults, eos_token_ids: of generation_config.json; see `generation_defaults`.
    """

    source: str
    tokenizer: RustTokenizer
    special_tokens: dict[str, str]
    template: str | None
    defaults: dict[str, float | int]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read them from an engine directory. Raises EngineError."""
        try:
            return cls.parse(read_contents(directory, directory), str(directory))
        except ValueError as error:
            raise EngineError(f"The tokenizer in {directory} cannot be read: {error}.") from None

    @classmethod
    def parse(cls, contents: Mapping[str, bytes], source: str) -> TokenizerFiles:
        """Check files by name. Raises ValueError, whose text names the file."""
        if TOKENIZER not in contents:
            raise ValueError(f"{TOKENIZER} does not exist")
        tokenizer = _in(TOKENIZER, _load, contents[TOKENIZER])
        settings = _in(SETTINGS, json_object, contents.get(SETTINGS, b"{}"))
        special_tokens = _in(SETTINGS, _special_tokens, settings)
        if TEMPLATE in contents:
            template: str | None = _in(TEMPLATE, utf8, contents[TEMPLATE])
        else:
            template = _in(SETTINGS, _template, settings.get("chat_template"))
        defaults, eos = _in(GENERATION, generation_defaults, contents.get(GENERATION, b"{}"))
        return cls(source, tokenizer, special_tokens, template, defaults, eos)


def read_contents(tokenizer: Path, generation: Path) -> dict[str, bytes]:
    """The files that exist, by name, unchecked.

    Args:
        tokenizer: directory of all but generation_config.json.
        generation: directory of that.
    Raises:
        ValueError: one cannot be read; the text names it.
    """
    contents = {}
    for directory, name in (
        (tokenizer, TOKENIZER),
        (tokenizer, SETTINGS),
        (tokenizer, TEMPLATE),
        (generation, GENERATION),
    ):
        most = MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_CONFIG_BYTES
        try:
            contents[name] = _in(name, partial(read_small_file, most=most), directory / name)
        except FileNotFoundError:
            continue
    return contents


def _in(name: str, parse: Callable[[Any], _T], value: Any) -> _T:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _load(data: bytes) -> RustTokenizer:
    try:
        tokenizer = RustTokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode(_PROBE, add_special_tokens=False)
        decoder = json.loads(tokenizer.decoder.__getstate__()).get("type") if tokenizer.decoder else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception, and its panics are not even that
        raise ValueError(f"it is not a tokenizer ({str(error)[:200] or type(error).__name__})") from None
    if decoder != "ByteLevel":
        raise ValueError(f"decoder {decoder!r} is not supported, only 'ByteLevel'")
    return tokenizer


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in settings.items():
        if not name.endswith("_token") or not isinstance(value, str | dict):
            continue  # add_bos_token and the like are no tokens
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(f"{shown(name)} is {shown(value)}, expected a text, or an object with a text 'content'")
        found[name] = text
    return found


def _template(value: Any) -> str | None:
    """The chat template of a tokenizer_config.json: a text, or a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value
    entries: list[Any] = value if isinstance(value, list) else [None]
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ValueError(
                f"chat_template is {shown(value)}, expected a text, or a list of objects with the texts 'name' and "
                "'template'"
            )
    named: dict[str, str] = {entry["name"]: entry["template"] for entry in entries}
    if named and "default" not in named:
        raise ValueError(f"chat_template has no template named 'default', only {listed([shown(n) for n in named])}")
    return named.get("default")
