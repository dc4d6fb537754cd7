"""TokenCache: token ids of the parts of long texts, so that the next turn of a conversation tokenises what is new."""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby, pairwise
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

MAX_BYTES = 32 << 20
"""Of all entries: some 8 million tokens."""
SHORT_CHARACTERS = 2000
"""Below it a text is encoded within a millisecond, the quickest where no other thread may run; it is not kept."""
_ENTRY_BYTES = 320
"""Of an entry besides its ids: key, array, and its place in the dict."""
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Split")
"""Those that look at nothing beyond the part of a text that they split."""


class TokenCache:
    """Encodes texts, and remembers what it encoded last, within a bound of bytes. Thread-safe.

    A text is cut in front of every special added token; in a chat these are the marks of the roles, so that a part is
    a message. The library itself takes added tokens out of a text first and encodes what is between them part by part,
    so the parts' ids are the whole text's. Where that does not hold for a tokenizer, nothing is cut or kept.
    """

    def __init__(self, tokenizer: RustTokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._marks = _marks(tokenizer)
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """What the entries take."""
        return self._bytes

    @property
    def cuts(self) -> bool:
        """Whether this tokenizer's texts can be cut."""
        return bool(self._marks)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; added tokens in it are recognised, none are added."""
        if len(text) < SHORT_CHARACTERS:
            return self._encode_now([text])[0]
        parts = self._parts(text)
        if len(parts) == 1:
            return self._encode_batch(parts)[0]
        keys = [blake2b(part.encode("utf-8", "surrogatepass"), digest_size=16).digest() for part in parts]
        found = self._known(keys)
        missing = {key: part for key, part in zip(keys, parts, strict=True) if key not in found}
        if missing:
            encoded = self._encode_batch(list(missing.values()))
            new = {key: array("I", ids) for key, ids in zip(missing, encoded, strict=True)}
            self._keep(new)
            found |= new
        ids: list[int] = []
        for key in keys:
            ids += found[key]
        return ids

    def _parts(self, text: str) -> list[str]:
        starts = sorted(found.start() for mark in self._marks for found in mark.finditer(text))
        bounds = [0, *(start for start in starts if start), len(text)]
        return [text[start:end] for start, end in pairwise(bounds)]

    def _known(self, keys: Sequence[bytes]) -> dict[bytes, array[int]]:
        found = {}
        with self._lock:
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                    found[key] = ids
        return found

    def _keep(self, new: dict[bytes, array[int]]) -> None:
        with self._lock:
            for key, ids in new.items():
                if key not in self._entries and _size(ids) <= self._max_bytes:  # another thread may have been quicker
                    self._entries[key] = ids
                    self._bytes += _size(ids)
            while self._bytes > self._max_bytes:
                _, ids = self._entries.popitem(last=False)
                self._bytes -= _size(ids)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Long texts are encoded while the other threads, the engine's among them, run."""
        if sum(map(len, texts)) < SHORT_CHARACTERS:
            return self._encode_now(texts)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_now(self, texts: list[str]) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _size(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES


def _marks(tokenizer: RustTokenizer) -> list[re.Pattern[str]]:
    """What finds the special added tokens in a text, by their first characters.

    Empty where cutting in front of them changes what a text is encoded to, or may.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    # The library looks for normalized ones later, within the parts that the others leave.
    first = [token for token in added if not token.normalized and token.content]
    special = sorted({token.content for token in first if token.special})
    plain = not any(token.lstrip or token.rstrip or token.single_word for token in first)
    alone = not any(_takes(token.content, mark) for token in first for mark in special)
    local = tokenizer.normalizer is None and _is_local(tokenizer.pre_tokenizer)
    if not plain or not alone or not local or getattr(tokenizer.model, "dropout", None):
        return []
    # One literal in front of the choice: to look for it is some times quicker than to look for any of several.
    return [
        re.compile(re.escape(start) + f"(?:{'|'.join(re.escape(mark[1:]) for mark in marks)})")
        for start, marks in groupby(special, key=lambda mark: mark[0])
    ]


def _takes(content: str, mark: str) -> bool:
    """Whether an added token found in a text may cover the beginning of a mark that stands there, too.

    The library takes the leftmost token, and of several there the longest.
    """
    if content == mark:
        return any(mark.startswith(mark[i:]) for i in range(1, len(mark)))
    return mark in content or any(mark.startswith(content[i:]) for i in range(1, len(content)))


def _is_local(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer splits a part of a text the same wherever it stands."""
    if pre_tokenizer is None:
        return True
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    return all(step.get("type") in _PRE_TOKENIZERS for step in steps)
