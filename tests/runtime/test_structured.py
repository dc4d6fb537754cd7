"""Structured output: masks allow exactly what the grammar does, over flint-nano's vocabulary and a larger one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flint_runtime.errors import UsageError
from flint_runtime.json_schema import KNOWN_FORMATS
from flint_runtime.request import Grammar
from flint_runtime.sampling_params import StructuredOutputsParams
from flint_runtime.structured import GrammarCompiler
from flint_runtime.tokenizer import Tokenizer
from tests.shapes import NANO_DIRECTORY

TOKENIZER = Tokenizer(NANO_DIRECTORY)
VOCAB = TOKENIZER.vocab_size + 64  # as a model whose embedding is padded
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
EOS = set(TOKENIZER.eos_token_ids)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def allowed(grammar: Grammar) -> set[int]:
    mask = grammar.mask()
    if mask is None:
        return set(range(VOCAB))
    assert mask.shape == (VOCAB // 32,) and mask.dtype == "int32"
    return {v for v in range(VOCAB) if mask[v // 32] >> (v % 32) & 1}


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a text, token by token, is allowed and complete; `mask` and `accept` agree."""
    for token in TOKENIZER.encode(text):
        fits = token in allowed(grammar)
        assert grammar.accept(token) == fits
        if not fits:
            return False
    return bool(EOS & allowed(grammar))


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        (
            {"json": SCHEMA},
            ['{"city": "Paris", "degrees": 12}', '{\n  "city": "日本\\"",\n  "degrees": -3\n}'],
            ['{"city": "Paris"}', "{}", '{"city": 1, "degrees": 12}', 'Sure: {"city": ""'],
        ),
        ({"json": json.dumps(SCHEMA)}, ['{"city":"","degrees":0}'], ["[]"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '"a"', '{"a": 1']),
        (
            {"json": SCHEMA, "whitespace_pattern": "[ ]?"},
            ['{"city": "", "degrees": 0}'],
            ['{\n"city": "", "degrees": 0}'],
        ),
        ({"json_object": True, "whitespace_pattern": "~?"}, ['{~"a":~1}'], ['{ "a": 1}']),
        ({"json": "true", "whitespace_pattern": "~?"}, ["[1,~2]"], ["[1, 2]"]),
        ({"regex": r"[0-9]{2}(a|é)*"}, ["12", "12aéa"], ["1", "123", "é"]),
        ({"choice": ["yes", "no", "no way", 'q"\\\n']}, ["yes", "no", "no way", 'q"\\\n'], ["y", "nono", "maybe"]),
        ({"grammar": 'root ::= "a" | "(" root ")"'}, ["a", "((a))"], ["(a", "()"]),
        ({"grammar": 'start: "a" | "(" start ")"'}, ["a", "((a))"], ["(a", "()"]),
    ],
)
def test_allows_what_matches(params: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert matches(COMPILER.compile(StructuredOutputsParams(**params)), text), text
    for text in wrong:
        assert not matches(COMPILER.compile(StructuredOutputsParams(**params)), text), text


def test_a_complete_text_is_finished() -> None:
    """Then nothing but an end may follow; a text that may go on is not."""
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["no", "no way"]))
    assert matches(grammar, "no") and not grammar.finished
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["no"]))
    assert matches(grammar, "no") and grammar.finished and allowed(grammar) == EOS
    assert grammar.accept(min(EOS))


def test_tokens_without_text_and_special_tokens_are_never_allowed() -> None:
    found = allowed(COMPILER.compile(StructuredOutputsParams(regex=r"(?s:.)*")))
    assert max(found) < TOKENIZER.vocab_size
    assert {token for token in found if TOKENIZER.is_special(token)} == EOS


def test_white_space_ends() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(json=SCHEMA))
    (space,) = TOKENIZER.encode(" ")
    assert grammar.accept(TOKENIZER.encode("{")[0])
    written = 0
    while space in allowed(grammar):
        assert grammar.accept(space) and written < 100
        written += 1
    assert allowed(grammar)


def test_the_thinking_part_is_free() -> None:
    """But cannot be the end of the answer."""
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["yes"]), thinking=True)
    assert allowed(grammar) == set(range(VOCAB)) - EOS
    for token in TOKENIZER.encode("Is it 12? yes"):
        assert grammar.accept(token)
    assert not grammar.accept(min(EOS)) and not grammar.finished
    assert grammar.accept(TOKENIZER.encode("</think>")[0])
    assert not EOS & allowed(grammar) and matches(grammar, "yes") and grammar.finished


def test_a_token_that_is_not_allowed_changes_nothing() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(regex="[a-f]{3}"))
    assert not grammar.accept(TOKENIZER.encode("z")[0])
    assert not grammar.finished and grammar.error is None and matches(grammar, "abc")


def test_a_parser_that_has_given_up_ends_no_answer() -> None:
    """So that the request ends with an error, not with half a text."""
    session = COMPILER._pool.open("regex", "[a-f]{3}")
    session.advance(TOKENIZER.encode("z")[0])
    assert session.wait(10) and session.error and not session.finished and not session.mask.any()


def test_requests_do_not_share_a_state() -> None:
    """The second request gets the grammar from the cache, and so does who asks while it is being compiled."""
    params = StructuredOutputsParams(choice=["ab", "cd"])
    compiled = COMPILER._pool.compiled
    with ThreadPoolExecutor(4) as threads:
        grammars = list(threads.map(lambda _: COMPILER.compile(params), range(8)))
    assert all(matches(grammar, "ab") for grammar in grammars)
    assert COMPILER._pool.compiled == compiled + 1


def test_what_was_refused_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="unclosed"):
            COMPILER.compile(StructuredOutputsParams(regex="(again"))
        monkeypatch.setattr(COMPILER._pool, "_start", None)  # Nothing is compiled again.


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": {"type": "foo"}}, "foo"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"const": {1, 2}}}, "is not JSON"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": "false"}, "no text matches"),
        ({"json": "[]"}, "must be an object"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "no text matches it"),
        ({"json": '{"anyOf":[' * 5000 + "{}" + "]}" * 5000}, "nested too deeply"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "no text matches it"),
        ({"regex": "a" * (5 << 20)}, "has 5,242,880 characters, and may have 2,097,152"),
        ({"json": "[" * (3 << 20), "whitespace_pattern": " "}, "has 3,145,728 characters, and may have 2,097,152"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_compiled(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        COMPILER.compile(StructuredOutputsParams(**params))


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_formats_that_the_library_knows(name: str) -> None:
    """So that it gets them, and only the others are left out."""
    grammar = COMPILER.compile(StructuredOutputsParams(json={"type": "string", "format": name}))
    assert matches(grammar, '"@ @"') == (name == "unknown")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "color"},
        {"type": "string", "format": "uri-reference"},
        {"type": "string", "not": False},
        {"type": "object", "properties": {"format": {"type": "string", "format": "color"}}},
        {"type": "array", "items": {"type": "string", "format": "x"}, "uniqueItems": False},
        {"type": "object", "unevaluatedProperties": True, "propertyNames": {}, "dependentRequired": {}},
        {"$ref": "#/components/a", "components": {"a": {"type": "array", "uniqueItems": False}}},
        {"enum": [{"format": "color", "uniqueItems": False}]},
        True,
    ],
    ids=str,
)
def test_keywords_that_say_nothing(schema: dict[str, Any] | bool) -> None:
    """Are no reason to refuse a schema, wherever they stand; what only looks like them stays."""
    values: list[Any] = ["red", ["a", "a"], {"format": "red"}, {"b": 1}, {"format": "color", "uniqueItems": False}]
    right = {json.dumps(value) for value in values if _valid(schema, value)}
    found = {
        json.dumps(v)
        for v in values
        if matches(COMPILER.compile(StructuredOutputsParams(json=json.dumps(schema))), json.dumps(v))
    }
    assert found == right and right


def _valid(schema: dict[str, Any] | bool, value: Any) -> bool:
    """By hand, as far as these schemas go."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return isinstance(value, list)
    if "enum" in schema:
        return value in schema["enum"]
    return isinstance(value, {"string": str, "array": list, "object": dict}[schema["type"]])


def test_imports_no_torch() -> None:
    code = "import sys; import flint_runtime.structured; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_open_thinking() -> None:
    def opens(text: str) -> bool:
        return TOKENIZER.opens_thinking(TOKENIZER.encode(text))

    assert opens("<|user|>hi<|assistant|><think>") and opens("<think>so far")
    assert not opens("<|user|>what is <think>?<|assistant|>") and not opens("<|assistant|><think>a</think>")
    assert not opens("plain") and not opens("")


def test_a_directory_without_ends(tmp_path: Path) -> None:
    """Without end-of-sequence ids no grammar could let a text end."""
    shutil.copy(NANO_DIRECTORY / "tokenizer.json", tmp_path)
    with pytest.raises(UsageError, match="eos_token_id"):
        GrammarCompiler(Tokenizer(tmp_path), VOCAB)
