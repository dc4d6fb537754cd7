"""TokenCache: the ids of a whole text, whatever its added tokens and whatever was encoded before; and its bounds."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from flint_runtime import token_cache
from flint_runtime.token_cache import TokenCache
from tests.shapes import NANO_DIRECTORY

NANO: dict[str, Any] = json.loads((NANO_DIRECTORY / "tokenizer.json").read_text())
MARKERS = [token["content"] for token in NANO["added_tokens"]]
OVERLAPPING = [
    "<|user|>",
    "<|user|>x",
    "<|us",
    "er|>",
    "user",
    " the",
    "the ",
    "é",
    "<",
    "\n",
    "12",
    "<|",
    "<a>",
    "[b]",
]
"""Contents that contain, begin and continue each other, and whose edges are white space and words."""
PIECES = [
    *MARKERS,
    *OVERLAPPING,
    "<|use",
    "r|>",
    " ",
    "  ",
    "\n\n",
    "x",
    "the",
    "theory",
    "3",
    "日本",
    "👩‍👩‍👧",
    "'s",
    "_",
]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def rust_tokenizer(**changes: Any) -> RustTokenizer:
    return RustTokenizer.from_str(json.dumps({**NANO, **changes}))


def added_token(index: int, content: str, flags: dict[str, bool]) -> dict[str, Any]:
    return {"id": 747 + index, "content": content, **dict.fromkeys(FLAGS, False), **flags}


@pytest.fixture(autouse=True, scope="module")
def short_texts_are_cut() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "SHORT_CHARACTERS", 1)
        yield


TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)
PLAIN = st.fixed_dictionaries({"special": st.booleans(), "normalized": st.booleans()})
ANY = st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS})


@st.composite
def tokenizers(draw: st.DrawFn, flags: st.SearchStrategy[dict[str, bool]]) -> RustTokenizer:
    contents = draw(st.lists(st.sampled_from(OVERLAPPING), min_size=1, max_size=6, unique=True))
    return rust_tokenizer(added_tokens=[added_token(i, text, draw(flags)) for i, text in enumerate(contents)])


def check(tokenizer: RustTokenizer, texts: list[str], max_bytes: int) -> TokenCache:
    cache = TokenCache(tokenizer, max_bytes)
    for text in texts:
        assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
        assert 0 <= cache.num_bytes <= max_bytes
    return cache


BYTES = st.sampled_from([0, 700, 2000, 1 << 20])


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), BYTES)
def test_ids_are_those_of_the_whole_text(texts: list[str], max_bytes: int) -> None:
    """Each text, and each continued by the next ones."""
    grown = ["".join(texts[: i + 1]) for i in range(len(texts))]
    assert check(TOKENIZER, [*texts, *grown, *texts], max_bytes).cuts


@settings(max_examples=150, deadline=None)
@given(tokenizers(PLAIN), st.lists(TEXTS, min_size=1, max_size=3), BYTES)
def test_added_tokens_that_overlap(tokenizer: RustTokenizer, texts: list[str], max_bytes: int) -> None:
    check(tokenizer, [*texts, "".join(texts)], max_bytes)


@settings(max_examples=150, deadline=None)
@given(tokenizers(ANY), st.lists(TEXTS, min_size=1, max_size=3))
def test_added_tokens_of_every_kind(tokenizer: RustTokenizer, texts: list[str]) -> None:
    """Those that take white space with them, stand for whole words only, or are looked for later."""
    check(tokenizer, [*texts, "".join(texts)], 1 << 20)


@pytest.mark.parametrize(
    ("contents", "cuts"),
    [
        ({"<a>": True, "<ab>": True, "[b]": True, "b]": False}, True),  # b] begins within [b], which is there first
        ({"<|us": False, "<|user|>": True}, True),  # of two that begin there, the longer
        ({"<|us": False, "<|user|>": False, "er|>": True}, False),  # within another
        ({"<|user|>": True, "<|user|>x": False}, False),
        ({"x<": False, "<|user|>": True}, False),  # behind another's last character
        ({"abab": True}, False),  # behind its own
    ],
)
def test_added_tokens_that_cover_others(contents: dict[str, bool], cuts: bool) -> None:
    tokenizer = rust_tokenizer(
        added_tokens=[added_token(i, text, {"special": special}) for i, (text, special) in enumerate(contents.items())]
    )
    texts = ["".join(some) for some in product([*contents, "x", " the"], repeat=3)]
    assert check(tokenizer, ["<|us<|user|>er|>x<|user|>xb[b]b]<a><ab>ababab", *texts], 1 << 20).cuts == cuts


TOKENIZER = rust_tokenizer()


@pytest.mark.parametrize(
    ("changes", "cuts"),
    [
        ({}, True),
        ({"pre_tokenizer": None}, True),
        ({"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}}, True),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}}, False),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"normalizer": {"type": "Prepend", "prepend": "x"}}, False),
        ({"model": {**NANO["model"], "dropout": 0.5}}, False),
        ({"added_tokens": []}, False),
        ({"added_tokens": [added_token(0, "<a>", {})]}, False),
        ({"added_tokens": [added_token(0, "<a>", {"special": True})]}, True),
        ({"added_tokens": [added_token(0, "<a>", {"special": True, "normalized": True})]}, False),
        ({"added_tokens": [added_token(0, "<a>", {"special": True}), added_token(1, "<b>", {"lstrip": True})]}, False),
        ({"added_tokens": [added_token(0, "<a>", {"special": True}), added_token(1, "<b>", {"rstrip": True})]}, False),
        ({"added_tokens": [added_token(0, "<a>", {"special": True, "single_word": True})]}, False),
    ],
)  # fmt: skip
def test_which_texts_are_cut(changes: dict[str, Any], cuts: bool) -> None:
    tokenizer = rust_tokenizer(**changes)
    cache = TokenCache(tokenizer)
    assert cache.cuts == cuts
    text = "the <a> x <b> y" * 3 + "<|user|> the <|assistant|> x"
    for _ in range(2):
        if not changes.get("model"):
            assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert cuts or cache.num_bytes == 0


class Counting:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return TOKENIZER.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return TOKENIZER.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def turn(number: int) -> str:
    return f"<|user|>Question {number}, of some length.<|assistant|><think>Hm.</think>Answer {number}."


def test_the_next_turn_encodes_what_is_new() -> None:
    counting = Counting()
    cache = TokenCache(counting)  # type: ignore[arg-type]
    text = "[gMASK]<sop><|system|>" + "Rules. " * 1000
    for number in range(20):
        text += turn(number)
        before = counting.characters
        assert cache.encode(text + "<|assistant|><think>") == TOKENIZER.encode(text + "<|assistant|><think>").ids
        new = counting.characters - before
        assert new < 100 or (number == 0 and new < len(text) + 100)
    before = counting.characters
    text = text.replace("<think>Hm.</think>", "</think>", 1)  # as where the first turn's thinking is dropped
    cache.encode(text)
    assert counting.characters - before < 100


def test_what_was_used_last_stays() -> None:
    counting = Counting()
    one, other = turn(1), turn(2)
    cache = TokenCache(counting, max_bytes=2200)  # type: ignore[arg-type]
    cache.encode(one)
    for number in range(3, 30):
        cache.encode(turn(number))
        before = counting.characters
        cache.encode(one)
        assert counting.characters == before, "it was used a moment ago"
    cache.encode(other)
    before = counting.characters
    cache.encode(turn(3))
    assert counting.characters > before, "it was forgotten"


def test_threads() -> None:
    """Every answer is right, and the account of the bytes stays right while parts are kept and forgotten."""
    cache = TokenCache(TOKENIZER, max_bytes=20_000)
    texts = ["".join(turn(random.Random(seed).randrange(60)) for seed in range(s, s + 12)) for s in range(40)]
    expected = [TOKENIZER.encode(text).ids for text in texts]

    def work(seed: int) -> bool:
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        return all(cache.encode(texts[i]) == expected[i] for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
    assert 0 < cache.num_bytes <= 20_000
    assert cache.num_bytes == sum(map(token_cache._size, cache._entries.values()))


def test_half_of_a_surrogate_pair_is_the_librarys_to_refuse() -> None:
    text = turn(1) + "\ud800" + turn(2)
    with pytest.raises(Exception) as expected:
        TOKENIZER.encode(text)
    with pytest.raises(type(expected.value)):
        TokenCache(TOKENIZER).encode(text)
