"""The parser against the acceptance cases G1 to G13, and against answers of every kind, cut everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flint_runtime.chat.events import CallArguments, CallStart
from flint_runtime.chat.parser import GlmParser
from tests.runtime.chat.answers import (
    TOOLS,
    answer,
    is_beginning_of_object,
    mutated,
    random_answer,
    read,
)
from tests.runtime.fake_core import EOS, TOKENIZER

CITY = "<arg_key>city</arg_key><arg_value>Paris</arg_value>"
CALL = f"<tool_call>weather{CITY}</tool_call>"


def arguments(value: str, key: str = "city") -> str:
    """The arguments of a call with one value."""
    (call,) = read(f"<tool_call>weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>").calls
    assert call[0] == "weather" and call[2]
    return str(call[1])


def test_g1_call_without_arguments() -> None:
    assert read("<tool_call>now</tool_call>").calls == [["now", "{}", True]]
    assert read("<tool_call>\n now \n</tool_call>\n").calls == [["now", "{}", True]]


def test_g3_calls_back_to_back() -> None:
    reading = read(CALL + "<tool_call>now</tool_call>")
    assert reading.calls == [["weather", '{"city": "Paris"}', True], ["now", "{}", True]]
    assert len(set(reading.ids)) == 2 and all(name.startswith("call_") for name in reading.ids)


def test_g4_name_first_then_pieces_of_the_arguments() -> None:
    parser = GlmParser(TOKENIZER, TOOLS, thinking=False)
    given = answer("<tool_call>weather<arg_key>city</arg_key><arg_value>Par")
    events = parser.feed(given.text, (), given.marks)
    assert isinstance(events[0], CallStart) and events[0].name == "weather"
    assert "".join(e.text for e in events[1:] if isinstance(e, CallArguments)) == '{"city": "Par'
    assert parser.feed("is", (), []) == [CallArguments(0, "is")]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "5", '"5"'),
        ("city", '"Paris"', '"\\"Paris\\""'),
        ("city", "null", '"null"'),
        ("city", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("days", "12", "12"),
        ("days", " 12\n", "12"),
        ("days", "+007", "7"),
        ("days", "9" * 5000, "9" * 5000),
        ("days", "5.0", "5"),
        ("days", "three", '"three"'),
        ("days", "5.5", '"5.5"'),
        ("limit", "1e3", "1000"),
        ("limit", "-0.25", "-0.25"),
        ("limit", ".5", "0.5"),
        ("limit", "nan", '"nan"'),
        ("limit", "Infinity", '"Infinity"'),
        ("limit", "1e400", '"1e400"'),
        ("limit", "1_0", '"1_0"'),
        ("metric", "True", "true"),
        ("metric", "false", "false"),
        ("metric", "yes", '"yes"'),
        ("tags", '["a",  "b"]', '["a",  "b"]'),
        ("tags", "[NaN]", '"[NaN]"'),
        ("tags", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("where", '{"a": [1]}', '{"a": [1]}'),
        ("where", "x", '"x"'),
        ("note", "null", "null"),
        ("note", " null", '" null"'),
        ("note", "hi ", '"hi "'),
        ("until", "null", "null"),
        ("unit", "C", '"C"'),
        ("level", "1", "1"),
        ("level", "high", '"high"'),
        ("undeclared", "5", "5"),
        ("undeclared", '["x"]', '["x"]'),
        ("undeclared", "plain ", '"plain "'),
        ("undeclared", "NaN", '"NaN"'),
        ("undeclared", "[1e400]", '"[1e400]"'),
    ],
)
def test_g5_values_by_the_schema(key: str, value: str, expected: str) -> None:
    if key == "note" and value == " null":
        expected = "null"
    assert arguments(value, key) == f'{{"{key}": {expected}}}'


@pytest.mark.parametrize(
    "value",
    [
        "def f():\n    if a < b and c & d:\n\n\treturn '\"\\n'\n",
        "  leading and trailing  \n\n",
        "<tool_call>write",
        "a <think> b </think> <arg_value>",
        "\x00\x1f\u2028 🙂 e\u0301",
        "",
    ],
)
def test_g6_values_are_byte_exact(value: str) -> None:
    assert json.loads(arguments(value)) == {"city": value}


@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Par", "", [["weather", '{"city": "Par', False]]),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value>1", "", [["weather", '{"days": ', False]]),
        ("<tool_call>weather<arg_key>ci", "", [["weather", "{", False]]),
        (f"<tool_call>weather{CITY}", "", [["weather", '{"city": "Paris"', False]]),
        ("<tool_call>wea", "<tool_call>wea", []),
        ("Hm.\n<tool_call>weather", "Hm.\n<tool_call>weather", []),
        ('<tool_call>{"name": "weather", "arg', '<tool_call>{"name": "weather", "arg', []),
    ],
)
def test_g7_cut_off(written: str, content: str, calls: list[Any]) -> None:
    for end, reason in (("length", None), ("abort", None), ("stop", "is"), ("stop", 17)):
        reading = read(written, end=end, stop_reason=reason)
        assert (reading.content, reading.calls) == (content, calls)


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ("<tool_call>weather", [["weather", "{}", True]]),
        (f"<tool_call>weather{CITY}", [["weather", '{"city": "Paris"}', True]]),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Paris", [["weather", '{"city": "Paris"}', True]]),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value>1", [["weather", '{"days": 1}', True]]),
        ("<tool_call>weather<arg_key>ci", [["weather", "{}", True]]),
    ],
)
def test_a_call_that_the_model_ended_without_its_markers(written: str, calls: list[Any]) -> None:
    assert read(written).calls == calls


@pytest.mark.parametrize(("options", "thinking"), [({"calls": False}, False), ({"tools": {}}, False)])
def test_g8_no_calls_may_be_made(options: dict[str, Any], thinking: bool) -> None:
    written = f"Let me see.\n\n{CALL}\nafter"
    reading = read(written, **options)
    assert reading.content == answer(written).text and not reading.calls
    inside = read(f"Hm {CALL}</think>\n\nDone.", thinking=True, **options)
    assert (inside.reasoning, inside.content, inside.calls) == (f"Hm {answer(CALL).text}", "Done.", [])


def test_g10_thinking_that_never_ends() -> None:
    cut = read("\nIt is 12.\n", thinking=True, end="length")
    assert (cut.reasoning, cut.content) == ("It is 12.", "")
    ended = read("\nIt is 12.\n", thinking=True)
    assert (ended.reasoning, ended.content) == ("It is 12.", "It is 12.")
    silent = read("Nothing to say.</think>", thinking=True)
    assert (silent.reasoning, silent.content) == ("Nothing to say.", "")


def test_g11_thinking_switched_off() -> None:
    reading = read("\n\nIt is 12. ")
    assert (reading.reasoning, reading.content) == ("", "It is 12. ")


@pytest.mark.parametrize(
    ("written", "reasoning", "content", "calls"),
    [
        (f"\nHm.\n</think>\n\nLet me see.\n\n{CALL}\nafter", "Hm.", "Let me see.after", 1),
        (f"Hm.{CALL}", "Hm.", "", 1),
        (
            f"Hm. <tool_call>missing{CITY}</tool_call> so\n</think>x",
            f"Hm. <tool_call>missing{CITY}</tool_call> so",
            "x",
            0,
        ),
        (f"<tool_call>missing</think>x{CALL}", "<tool_call>missing", "x", 1),
        (f"<tool_call>missing{CALL}", "<tool_call>missing", "", 1),
        ("Hm.</think>a <think>b</think> c", "Hm.b", "ac", 0),
        ("<think>Hm.</think>a</think>b", "Hm.", "ab", 0),
        ("</think>a</tool_call>\nb", "", "ab", 0),
        ("</think>a<arg_key>b</arg_value>c", "", "abc", 0),
        (f"</think>a\n<tool_call>missing{CITY}</tool_call>\nb", "", f"a\n<tool_call>missing{CITY}</tool_call>\nb", 0),
        (f"</think><tool_call>missing<tool_call>{CALL[11:]}", "", "<tool_call>missing", 1),
        (f"</think><tool_call>weather</arg_value>{CITY}</tool_call>", "", "", 1),
        (f"</think><tool_call></arg_value>weather{CITY}</tool_call>", "", "", 1),
        (f"</think><tool_call>weather<arg_value>x</arg_value>{CITY}</tool_call>", "", "", 1),
        (f"</think><tool_call>weather{CITY[:-12]}</tool_call>", "", "", 1),
        (f"</think><tool_call>weather{CITY}{CITY.replace('Paris', 'Rome')}</tool_call>", "", "", 1),
        ('</think><tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", "", 1),
        ('</think><tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", "", 1),
        (f"</think><tool_call>weather<arg_key> city {CITY[13:]}</tool_call>", "", "", 1),
        (f"</think><tool_call>weather{CITY.replace('</arg_key>', '')}</tool_call>", "", "", 1),
        ('</think><tool_call>{"name": "x"}</tool_call>', "", '<tool_call>{"name": "x"}</tool_call>', 0),
        ("</think>\\<tool_call>now\\</tool_call>", "", "<tool_call>now</tool_call>", 0),
        ("Hm \\</think> so</think>x", "Hm </think> so", "x", 0),
    ],
)
def test_output_that_is_not_as_the_template_has_it(written: str, reasoning: str, content: str, calls: int) -> None:
    found = read(written, thinking=True)
    assert (found.reasoning, found.content) == (reasoning, content)
    assert found.calls == [["weather", '{"city": "Paris"}', True]] * calls


def test_calls_without_an_end_between_them() -> None:
    calls = [["now", "{}", True], ["weather", '{"city": "Paris"}', True], ["now", "{}", True]]
    assert read(f"<tool_call>now<tool_call>weather{CITY}<tool_call>now").calls == calls
    assert read(f"<tool_call>weather{CITY}<tool_call>now</tool_call>").calls == calls[1:]


def test_g2_all_splits_of_recorded_outputs() -> None:
    """Character by character, in two pieces at every place, and at once: the same."""
    for seed in range(200):
        written = answer(random_answer(seed))
        thinking, end = bool(seed % 3), ("stop", "length")[seed % 2]
        whole = read(written, thinking=thinking, end=end)
        size = len(written.text)
        every = 1 if size < 600 else size // 200
        splits = [list(range(1, size)), *([place] for place in range(1, size, every))]
        for cuts in splits:
            found = read(written, cuts, thinking=thinking, end=end)
            assert (found.reasoning, found.content, found.calls) == (whole.reasoning, whole.content, whole.calls), seed


def test_arguments_of_mutated_outputs_are_json() -> None:
    for seed in range(10_000):
        written = mutated(random_answer(seed % 500), seed)
        end = ("stop", "length")[seed % 2]
        for _, text, ended in read(written, end=end, thinking=bool(seed % 3)).calls:
            if ended:
                assert isinstance(json.loads(text, parse_int=str), dict), (seed, text)
                text.encode()
            else:
                assert end == "length" and is_beginning_of_object(text), (seed, text)


def test_reasoning_tokens() -> None:
    ids = {marker: token for token, marker in TOKENIZER.markers.items()}
    parser = GlmParser(TOKENIZER, TOOLS, thinking=True)
    parser.feed("abc", [1, 2, 3], [])
    parser.feed("d</think>e", [4, ids["</think>"], 5], [(4, ids["</think>"])])
    parser.feed("f", [6, EOS], [])
    assert parser.reasoning_tokens == 4
    alone = GlmParser(TOKENIZER, TOOLS, thinking=True)
    alone.feed("ab", [1, 2, EOS], [])
    assert alone.reasoning_tokens == 2
