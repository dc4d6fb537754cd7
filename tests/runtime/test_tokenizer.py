"""The tokenizer against transformers' own, on flint-nano's files; and detokenisation of streams."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from flint_runtime.errors import EngineError, UsageError
from flint_runtime.tokenizer import Tokenizer
from tests.shapes import NANO_DIRECTORY
from tests.tools.nano_data import TOOLS, held_out_samples

TOKENIZER = Tokenizer(NANO_DIRECTORY)
ORACLE = AutoTokenizer.from_pretrained(NANO_DIRECTORY)
TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\n\ttab",
    "naïve café 日本語 👩‍👩‍👧 ﷽",
    "12 + 345 = 357",
    "<|user|>hi</think><tool_call>x",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_as_transformers(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == ORACLE.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.decode(ids) == ORACLE.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", [text * 3000 for text in TEXTS[1:]])
def test_long_texts(text: str) -> None:
    """Which are encoded without the interpreter lock; and a text has never fewer tokens than its bytes say."""
    ids = TOKENIZER.encode(text)
    assert ids == TOKENIZER._tokenizer.encode(text, add_special_tokens=False).ids
    assert 1 <= TOKENIZER.least_tokens(text) <= len(ids)


def test_texts_of_which_bytes_say_nothing(tmp_path: Path) -> None:
    """A normalizer, or a token that takes white space with it, may leave few tokens of many bytes."""
    shutil.copytree(NANO_DIRECTORY, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": [{**tokenizer["added_tokens"][0], "lstrip": True}]},
    ):
        path.write_text(json.dumps(tokenizer | change))
        assert Tokenizer(tmp_path).least_tokens("a" * 100_000) == 0


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [None], "ab", 5, None, [1.5]])
def test_what_are_no_token_ids(ids: Any) -> None:
    with pytest.raises(UsageError, match="token_ids must be"):
        TOKENIZER.decode(ids)


def conversations() -> list[dict[str, Any]]:
    """Conversations of every kind, with tools, thinking switched off, and content in parts."""
    found: list[dict[str, Any]] = [
        {"messages": s.messages[:-1], "tools": s.tools or None, "enable_thinking": s.thinking}
        for s in held_out_samples(1, 24)
    ]
    found.append(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "<&>é"}]}]}
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": {"k": [1, "ü"]}, "y": "a\n  b"}}}
    found.append(
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]},
                {"role": "tool", "content": "1"},
                {"role": "tool", "content": ""},
            ],
            "tools": list(TOOLS),
            "clear_thinking": False,
        }
    )
    return found


@pytest.mark.parametrize("conversation", conversations())
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_as_transformers(conversation: dict[str, Any], add_generation_prompt: bool) -> None:
    options = {**conversation, "add_generation_prompt": add_generation_prompt}
    messages = options.pop("messages")
    expected = ORACLE.apply_chat_template(messages, tokenize=False, **options)
    assert TOKENIZER.render_chat(messages, **options) == expected
    assert TOKENIZER.encode_chat(messages, **options) == ORACLE.encode(expected, add_special_tokens=False)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_stream_concatenates_to_the_whole(ids: list[int], skip: bool) -> None:
    """Random ids are mostly broken UTF-8; special tokens stand between."""
    stream = TOKENIZER.stream(skip)
    text = "".join(stream.add([token]) for token in ids) + stream.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_piece_has_a_broken_character(text: str) -> None:
    stream = TOKENIZER.stream()
    text = text.replace("�", "")
    pieces = [stream.add([token]) for token in TOKENIZER.encode(text)]
    assert not any("�" in piece for piece in pieces)
    assert stream.finish() == ""
    assert "".join(pieces) == TOKENIZER.decode(TOKENIZER.encode(text))


def test_bytes_are_held_until_a_character_is_complete() -> None:
    ids = TOKENIZER.encode("👩")
    assert len(ids) > 1
    stream = TOKENIZER.stream()
    assert [stream.add([token]) for token in ids] == [""] * (len(ids) - 1) + ["👩"]
    stream = TOKENIZER.stream()
    assert stream.add(ids[:-1]) == ""
    assert stream.finish() == "�"


def test_generation_config() -> None:
    assert TOKENIZER.eos_token_ids == (747, 754, 756)
    assert TOKENIZER.defaults == {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
    assert TOKENIZER.is_special(754) and not TOKENIZER.is_special(758)


def copy_with(tmp_path: Path, **files: str | None) -> Path:
    """flint-nano's files with some replaced or, for None, left out; `_` in a name stands for the last dot."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(NANO_DIRECTORY / name, tmp_path / name)
    for name, text in files.items():
        path = tmp_path / ".".join(name.rsplit("_", 1))
        path.unlink()
        if text is not None:
            path.write_text(text)
    return tmp_path


def test_template_helpers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n  {% if m.content == 'bad' %}{{ raise_exception('no bad') }}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}\n{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    tokenizer = Tokenizer(copy_with(tmp_path, chat_template_jinja=template))
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "b"}]
    rendered = tokenizer.render_chat(messages)
    assert rendered == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert '"<é>"' in rendered and rendered.endswith("4<|endoftext|>")
    with pytest.raises(UsageError, match="no bad"):
        tokenizer.render_chat([{"role": "user", "content": "bad"}])


def test_without_optional_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        copy_with(tmp_path, tokenizer_config_json=None, chat_template_jinja=None, generation_config_json=None)
    )
    assert tokenizer.eos_token_ids == () and tokenizer.defaults == {}
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_json": None}, "cannot be read"),
        ({"tokenizer_json": "{}"}, "cannot be read"),
        ({"chat_template_jinja": "{% if %}"}, "template .* is not valid"),
        ({"generation_config_json": "[]"}, "generation_config.json: it holds a JSON list"),
        ({"generation_config_json": json.dumps({"temperature": -1})}, "temperature"),
    ],
)
def test_damaged_files(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Tokenizer(copy_with(tmp_path, **files))
