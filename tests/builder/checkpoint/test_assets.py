"""The small files that an engine carries: tokenizer, chat template, generation config."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flint_builder.checkpoint.assets import read_assets
from flint_runtime.errors import CheckpointError, EngineError
from flint_runtime.tokenizer import Tokenizer
from flint_runtime.tokenizer_files import TokenizerFiles
from tests.builder.checkpoint import tiny
from tests.shapes import NANO, NANO_DIRECTORY

NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """flint-nano's small files, to damage."""
    for name in NAMES:
        shutil.copy(NANO_DIRECTORY / name, tmp_path / name)
    return tmp_path


def read(directory: Path) -> dict[str, bytes]:
    return read_assets(directory, directory, NANO)


def edit(directory: Path, name: str, **changes: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    path = directory / name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refused(directory: Path) -> str:
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    text = str(caught.value)
    assert str(directory) in text and "\n" not in text and len(text) < 1000 and time.process_time() - start < 2
    return text


def test_whole_files_are_taken_as_they_are(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(directory) == {name: (directory / name).read_bytes() for name in NAMES[1:]}
    assert not caplog.records


DEEP = "[" * 2000 + "]" * 2000
DAMAGE: list[tuple[str, str, str]] = [
    ("tokenizer.json", "{}", "tokenizer.json: it is not a tokenizer"),
    ("tokenizer.json", "3", "tokenizer.json: it is not a tokenizer"),
    ("tokenizer.json", DEEP, "tokenizer.json: it is not a tokenizer"),
    ("tokenizer_config.json", "3", "tokenizer_config.json: it holds a JSON number, expected an object"),
    ("tokenizer_config.json", "", "tokenizer_config.json: it is not JSON"),
    ("tokenizer_config.json", f'{{"a": {DEEP}}}', "tokenizer_config.json: its values are nested more than"),
    ("tokenizer_config.json", '{"eos_token": {}}', "'eos_token' is {}, expected a text"),
    ("tokenizer_config.json", '{"eos_token": {"content": 3}}', "'eos_token' is"),
    ("chat_template.jinja", "{% if %}", "chat template"),
    ("chat_template.jinja", "{{ " + DEEP + " }}", "chat template .* nested too deeply"),
    ("chat_template.jinja", "{{ x" + "(x" * 500 + ")" * 500 + " }}", "chat template"),
    ("chat_template.jinja", "{% for a in b %}" * 30 + "{% endfor %}" * 30, "chat template"),
    ("chat_template.jinja", "{{ x | no_such_filter }}", "chat template .*no_such_filter"),
    ("generation_config.json", "[]", "generation_config.json: it holds a JSON list"),
    ("generation_config.json", '{"temperature": NaN}', "generation_config.json: it has the number 'NaN'"),
    ("generation_config.json", '{"temperature": 1' + "0" * 400 + "}", "beyond 64 bits"),
    ("generation_config.json", '{"top_p": 7}', "generation_config.json: top_p must be"),
    ("generation_config.json", '{"eos_token_id": {}}', "eos_token_id is {}, expected a token id"),
    ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id is"),
    ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id is -1"),
    ("generation_config.json", '{"eos_token_id": 768}', "token 768, but the model's vocabulary has 768 tokens"),
    ("config.json", '{"eos_token_id": 768}', "token 768, but the model's vocabulary has 768 tokens"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGE, ids=[f"{n}-{c[:30]}" for n, c, _ in DAMAGE])
def test_damaged_files_are_refused(directory: Path, name: str, content: str, message: str) -> None:
    (directory / name).write_text(content)
    if name == "config.json":
        (directory / "generation_config.json").unlink()
    assert re.search(message, refused(directory))
    if name != "config.json" and "vocabulary" not in message:
        with pytest.raises(EngineError):
            Tokenizer(directory)


@pytest.mark.parametrize("name", NAMES[1:])
def test_unreadable_is_told_from_missing(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()
    assert f"{name}: it" in refused(directory)


def test_a_tokenizer_that_makes_its_library_panic(directory: Path) -> None:
    """Its panics are no Exceptions."""
    content = json.loads((directory / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert "tokenizer.json: it is not a tokenizer" in refused(directory)


def test_other_decoders_are_refused(directory: Path) -> None:
    edit(directory, "tokenizer.json", decoder={"type": "Fuse"})
    assert "decoder 'Fuse' is not supported" in refused(directory)


def test_added_tokens_beyond_the_vocabulary(directory: Path) -> None:
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    extra = [{**tokens[-1], "id": 768 + i, "content": f"<more {i}>"} for i in range(2)]
    edit(directory, "tokenizer.json", added_tokens=tokens + extra)
    message = refused(directory)
    assert "2 tokens beyond the model's vocabulary of 768" in message and "'<more 0>' with id 768" in message


@pytest.mark.parametrize("generation", [{"temperature": 0.5}, {"temperature": 0.5, "eos_token_id": None}, None])
def test_missing_end_of_sequence_is_taken_from_config(directory: Path, generation: dict[str, Any] | None) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(generation)) if generation is not None else path.unlink()
    found = TokenizerFiles.parse(read(directory), "x")
    assert found.eos_token_ids == (747, 754, 756)
    assert found.defaults == ({"temperature": 0.5} if generation else {})


def test_missing_end_of_sequence_is_taken_from_the_tokenizer(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(directory, "config.json", eos_token_id=None)
    (directory / "generation_config.json").unlink()
    assert TokenizerFiles.parse(read(directory), "x").eos_token_ids == (747,)
    edit(directory, "tokenizer_config.json", eos_token="<nowhere>")
    assert "eos_token is '<nowhere>', which is no token" in refused(directory)
    assert not caplog.records
    edit(directory, "tokenizer_config.json", eos_token=None)
    assert "generation_config.json" not in read(directory)
    assert "no end-of-sequence token" in caplog.records[0].getMessage()


def test_of_named_templates_default_is_taken_as_transformers(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
    ]
    edit(directory, "tokenizer_config.json", chat_template=named)
    ours = Tokenizer(TokenizerFiles.parse(read(directory), "x")).render_chat(MESSAGES)
    assert ours == "Hi<|endoftext|>"
    assert ours == AutoTokenizer.from_pretrained(directory).apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"name": "rag", "template": "x"}], "no template named 'default', only 'rag'"),
        ([{"name": "default"}], "chat_template is .*expected a text, or a list"),
        ([3], "chat_template is"),
        ({"default": "x"}, "chat_template is"),
        (3, "chat_template is 3"),
    ],
)
def test_template_lists_that_are_refused(directory: Path, value: Any, message: str) -> None:
    (directory / "chat_template.jinja").unlink()
    edit(directory, "tokenizer_config.json", chat_template=value)
    assert re.search(message, refused(directory))


def test_constants_of_a_template_are_not_computed(directory: Path) -> None:
    """jinja would fold them while it compiles: gigabytes, or hours."""
    (directory / "chat_template.jinja").write_text("{{ 'x' * 10**12 }}{{ 9**9**9**9 }}")
    start = time.process_time()
    read(directory)
    assert time.process_time() - start < 2


def test_truncation_and_padding_are_switched_off(directory: Path) -> None:
    """As transformers does: they would cut prompts without a word."""
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    edit(
        directory,
        "tokenizer.json",
        truncation=truncation,
        padding=padding | {"pad_type_id": 0, "pad_token": "<|endoftext|>"},
    )
    read(directory)
    text = "one two three four five"
    assert Tokenizer(directory).encode(text) == Tokenizer(NANO_DIRECTORY).encode(text)


def test_a_lone_file_is_enough(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    for name in NAMES[2:]:
        (tmp_path / name).unlink()
    checkpoint, _ = tiny.opened(path)
    assert set(checkpoint.assets) == {"tokenizer.json", "generation_config.json"}
