"""The GLM parser: the cases of glm-chat.md by their ids, the table of decisions, all splits, and damaged answers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from flint_runtime.chat.events import CallArguments, CallStart
from flint_runtime.chat.parser import GlmParser
from flint_runtime.tokenizer import MARKERS
from tests.runtime.chat.answers import IDS, TOKENIZER, TOOLS, parse, pieces, random_answer


def call(key: str, value: str, end: str = "</arg_value></tool_call>") -> str:
    return f"<tool_call>weather<arg_key>{key}</arg_key><arg_value>{value}{end}"


def arguments(source: str, finish: str = "stop", **more: Any) -> str:
    """Of the only call, the same whole and character by character."""
    found, split = (parse(source, finish, cuts=cuts, **more) for cuts in (None, 1))
    assert found.same() == split.same()
    ((_, text),) = found.calls
    return text


def test_g1_a_call_without_arguments() -> None:
    for source in ("<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>", "<tool_call>\nnow </tool_call>"):
        found = parse(source)
        assert (found.calls, found.content, found.ended) == ([["now", "{}"]], "", [0])


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_g2_all_splits_give_the_same(start: int) -> None:
    """200 answers: character by character, in pieces of some sizes, in two at every place, and in random pieces."""
    for seed in range(start, start + 50):
        source, thinking, finish = random_answer(seed)
        answer = pieces(source)
        whole = parse(answer, finish, thinking=thinking).same()
        length = sum(len(text) for text, _ in answer)
        draw = random.Random(seed)
        drawn = [random_sizes(draw, length) for _ in range(5)]
        for cuts in (*range(1, 12), *([place] for place in range(1, length)), *drawn):
            assert parse(answer, finish, thinking=thinking, cuts=cuts).same() == whole, (seed, source, cuts)


def test_the_recorded_answers_cover_what_they_should() -> None:
    found = [parse(source, finish, thinking=thinking) for source, thinking, finish in map(random_answer, range(200))]
    assert sum(len(one.calls) > 1 for one in found) > 20
    assert sum(bool(one.reasoning and one.content and one.calls) for one in found) > 10
    assert sum(len(one.ended) < len(one.calls) for one in found) > 5
    assert sum("unknown" in one.content for one in found) > 10
    assert sum("<tool_call>now" in one.content for one in found) > 3


def test_g3_calls_back_to_back() -> None:
    found = parse("<tool_call>now</tool_call><tool_call>now_utc</tool_call>", cuts=1)
    assert found.calls == [["now", "{}"], ["now_utc", "{}"]] and len(set(found.ids)) == 2 and found.ended == [0, 1]


def test_g4_a_name_and_a_string_are_sent_as_they_come() -> None:
    parser = GlmParser(TOKENIZER, TOOLS, thinking=False)
    opened = parser.feed("<tool_call>weather", [IDS["<tool_call>"], 1], [(0, IDS["<tool_call>"])])
    assert opened == []
    start, brace = parser.feed("<arg_key>", [IDS["<arg_key>"]], [(18, IDS["<arg_key>"])])
    assert isinstance(start, CallStart) and start.name == "weather" and brace == CallArguments(0, "{")
    assert parser.feed("city", [1], []) == []
    parser.feed("</arg_key><arg_value>", [], [(31, IDS["</arg_key>"]), (41, IDS["<arg_value>"])])
    assert parser.feed('Par"', [1], []) == [CallArguments(0, 'Par\\"')]
    assert parser.feed(" \n", [1], []) == [CallArguments(0, " \\n")]


@pytest.mark.parametrize(("key", "value", "wanted"), [
    ("city", "5", '"5"'), ("city", "null", '"null"'), ("city", '{"a": 1}', '"{\\"a\\": 1}"'), ("city", "", '""'),
    ("city", " x\n", '" x\\n"'), ("city", "\ud800", '"\\ud800"'), ("city", "\x00\x1f\x7f", '"\\u0000\\u001f\x7f"'),
    ("days", "3", "3"), ("days", " -3\n", "-3"), ("days", "9" * 5000, "9" * 5000), ("days", "three", '"three"'),
    ("days", "007", '"007"'), ("days", "1.0", "1"), ("days", "NaN", '"NaN"'), ("days", "", '""'),
    ("ratio", "1e3", "1000"), ("ratio", "1.50", "1.50"), ("ratio", "nan", '"nan"'),
    ("ratio", "-Infinity", '"-Infinity"'),
    ("ratio", "1e999", '"1e999"'), ("ratio", "1e300", "1e300"), ("ratio", "5", "5"),
    ("deep", "True", "true"), ("deep", "false", "false"), ("deep", "yes", '"yes"'),
    ("list", "[1, 2 ]", "[1, 2 ]"), ("list", "[NaN]", '"[NaN]"'), ("list", "[1e999]", '"[1e999]"'),
    ("list", '["\\ud800"]', '["\\ud800"]'), ("list", "[" * 5000 + "]" * 5000, None), ("list", "[1,]", '"[1,]"'),
    ("list", json.dumps(["{[" * 300]), json.dumps(["{[" * 300])), ("map", '{"a":{"b":[]}}', '{"a":{"b":[]}}'),
    ("map", "{'a': 1}", "\"{'a': 1}\""), ("maybe", "null", "null"), ("maybe", "None", '"None"'), ("maybe", "5", '"5"'),
    ("either", "null", "null"), ("either", "4", "4"), ("either", "x", '"x"'), ("unit", "C", '"C"'), ("level", "2", "2"),
    ("linked", "12", "12"), ("open", "5", "5"), ("open", "x", '"x"'), ("open", "nan", '"nan"'), ("other", "5", "5"),
    ("other", "[1]", "[1]"), ("other", "True", '"True"'), ("other", "+5", '"+5"'),
])  # fmt: skip
def test_g5_an_argument_has_the_type_of_its_schema(key: str, value: str, wanted: str | None) -> None:
    found = arguments(call(key, value))
    found.encode()
    assert found == f'{{"{key}": {json.dumps(value) if wanted is None else wanted}}}'


def test_g6_code_is_byte_exact() -> None:
    code = "  def f(a):\n\n\tif a < 1 && b:\n        return \"x\\n\" + '<tag>' + \x01<tool_call>\n    \n"
    assert json.loads(arguments(call("city", code)))["city"] == code.replace("\x01", "")
    # As marker tokens, all but the two that end it.
    for marker in set(MARKERS) - {"</arg_value>", "</tool_call>"}:
        assert json.loads(arguments(call("city", f"a{marker}b")))["city"] == f"a{marker}b"


@pytest.mark.parametrize(("source", "wanted"), [
    (call("city", "Par", ""), '{"city": "Par'),
    (call("days", "1", ""), '{"days": '),
    ("<tool_call>weather<arg_key>ci", "{"),
    ("<tool_call>weather<arg_key>city</arg_key>", "{"),
    (call("city", "Par", "</arg_value>"), '{"city": "Par"'),
])  # fmt: skip
def test_g7_a_call_that_was_cut_off_is_never_closed(source: str, wanted: str) -> None:
    for reason in ("length", "abort", "error"):
        assert arguments(source, reason) == wanted
        assert parse(source, reason).ended == []
    assert arguments(source, "stop", stop_reason="x") == wanted, "the client's own stop text cuts it off too"
    json.loads(arguments(source))
    assert parse(source).ended == [0], "the model ended it itself"


@pytest.mark.parametrize("source", ["<tool_call>", "<tool_call>wea", "<tool_call>now", '<tool_call>{"name": "now"}'])
def test_g7_cut_off_in_or_behind_the_name_it_is_content(source: str) -> None:
    for cuts in (None, 1):
        found = parse(source, "length", cuts=cuts)
        assert (found.content, found.calls) == (source, [])


def test_g8_without_calls_a_call_is_content() -> None:
    source = "a \n" + call("city", " Paris") + "\n<tool_call>now</tool_call>\n"
    for cuts in (None, 1):
        found = parse(source, cuts=cuts, calls=False)
        assert (found.content, found.calls) == (source, [])
        assert parse(source, cuts=cuts, tools={}).same() == found.same()
        found = parse("t" + source + "</think>b", cuts=cuts, calls=False, thinking=True)
        assert (found.reasoning, found.content) == (("t" + source).strip(), "b")


def test_g10_without_the_end_of_thinking() -> None:
    for cuts in (None, 1):
        found = parse(" \nSeven.\n", "length", cuts=cuts, thinking=True)
        assert (found.reasoning, found.content) == ("Seven.", "")
        found = parse(" \nSeven it\nis.\n", "stop", cuts=cuts, thinking=True)
        assert (found.reasoning, found.content) == ("Seven it\nis.", "Seven it\nis.")
        found = parse("a<tool_call>now</tool_call><think>b", "stop", cuts=cuts, thinking=True)
        assert (found.reasoning, found.content) == ("ab", ""), "there is an answer"


def test_g11_without_thinking_all_is_content() -> None:
    found = parse("\n It is.\n", cuts=1)
    assert (found.reasoning, found.content, found.reasoning_tokens) == ("", "\n It is.\n", 0)


def test_g13_reasoning_is_trimmed_and_its_tokens_are_counted() -> None:
    for cuts in (None, 1):
        found = parse("\n\n7 + 5 \n</think>\n\n12 ", cuts=cuts, thinking=True)
        assert (found.reasoning, found.content) == ("7 + 5", "12 ")
        assert found.reasoning_tokens == len("\n\n7 + 5 \n")


@pytest.mark.parametrize(("source", "content", "calls"), [
    ("Let me see.\n\n<tool_call>now</tool_call>\nafter", "Let me see.after", [["now", "{}"]]),
    (call("city", "a", "</arg_value><arg_key>city</arg_key><arg_value>b</arg_value></tool_call>"), "",
     [["weather", '{"city": "a"}']]),
    (call("city", "Paris", "</tool_call>"), "", [["weather", '{"city": "Paris"}']]),
    ("a \n<tool_call>nix<arg_key>k</arg_key><arg_value> v</arg_value>\n</tool_call>\nb",
     "a \n<tool_call>nix<arg_key>k</arg_key><arg_value> v</arg_value>\n</tool_call>\nb", []),
    ("<tool_call>nowhere</tool_call>", "<tool_call>nowhere</tool_call>", []),
    ("<tool_call>now</arg_value></tool_call>", "", [["now", "{}"]]),
    ("<tool_call>weather<arg_value>x</arg_value><arg_key>days</arg_key><arg_value>1</arg_value></tool_call>", "",
     [["weather", '{"days": 1}']]),
    ('<tool_call>{"name": "weather", "arguments": {"city": "é", "n": [1]}}</tool_call>', "",
     [["weather", '{"city": "é", "n": [1]}']]),
    ('<tool_call>{"name": "nix"}</tool_call>', '<tool_call>{"name": "nix"}</tool_call>', []),
    ('<tool_call>[{"name": "now"}]</tool_call>', '<tool_call>[{"name": "now"}]</tool_call>', []),
    ("a\n</tool_call>", "a", []),
    ("\x01<tool_call>now\x01</tool_call>", "<tool_call>now</tool_call>", []),
    ("<tool_call>now<tool_call>now_utc</tool_call>", "", [["now", "{}"], ["now_utc", "{}"]]),
    ("<tool_call>nix<tool_call>now</tool_call>", "<tool_call>nix", [["now", "{}"]]),
    (call("ci\ty ", "x").replace("ci\ty", "\n city"), "", [["weather", '{"city": "x"}']]),
])  # fmt: skip
def test_the_table_of_readings(source: str, content: str, calls: list[list[str]]) -> None:
    for cuts in (None, 1, 5):
        found = parse(source, cuts=cuts)
        assert (found.content, found.calls, found.reasoning) == (content, calls, "")


def test_thinking_again_and_a_call_in_it() -> None:
    for cuts in (None, 1):
        found = parse("a</think>b\n<think> c </think>\nd", cuts=cuts, thinking=True)
        assert (found.reasoning, found.content) == ("ac", "bd")
        found = parse("a\n<tool_call>now</tool_call>\n</think>\nb", cuts=cuts, thinking=True)
        assert (found.reasoning, found.content, found.calls) == ("a", "b", [["now", "{}"]])


@pytest.mark.parametrize("spoken_of", [
    "<tool_call>", "<tool_call>wea", "<tool_call>now", '<tool_call>{"name": "now"}', "<tool_call>nix",
    "<tool_call>nix<arg_key>k", "<tool_call>nix<arg_key>k</arg_key><arg_value>v",
])  # fmt: skip
def test_what_thinking_only_speaks_of_does_not_keep_it_from_ending(spoken_of: str) -> None:
    for finish in ("stop", "length"):
        for cuts in (None, 1, 5):
            found = parse(f"a {spoken_of}</think>\nIt is.", finish, cuts=cuts, thinking=True)
            assert (found.reasoning, found.content, found.calls) == (f"a {spoken_of}", "It is.", [])
        found = parse(f"a {spoken_of}</think>b<tool_call>now</tool_call>", finish, cuts=1, thinking=True)
        assert (found.content, found.calls, found.ended) == ("b", [["now", "{}"]], [0])


def test_a_mark_beyond_the_text_is_ignored() -> None:
    marker = IDS["<tool_call>"]
    for left in ("ab", "ab<tool_", "ab<tool_call"):
        parser = GlmParser(TOKENIZER, TOOLS, thinking=False)
        events = parser.feed(left, [1, 1, marker], [(2, marker)]) + parser.finish("stop", "x")
        assert "".join(event.text for event in events) == left  # type: ignore[union-attr]


def test_a_schema_that_leads_back_to_itself_says_nothing() -> None:
    loop: dict[str, Any] = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "$ref": "#", "properties": {"a": {"$ref": "#"}}}
    tools = {"weather": TOOLS["weather"].__class__("weather", parameters=loop)}
    assert parse(call("a", "5") + call("b", "5"), tools=tools).calls == [
        ["weather", '{"a": 5}'],
        ["weather", '{"b": 5}'],
    ]


@pytest.mark.parametrize("start", range(0, 10_000, 2_500))
def test_10000_damaged_answers_give_objects_or_their_beginnings(start: int) -> None:
    for seed in range(start, start + 2_500):
        draw = random.Random(seed)
        source, thinking, _ = random_answer(draw.randrange(1_000_000))
        answer = pieces(source)
        for _ in range(draw.randint(1, 5)):
            place, kind = draw.randint(0, len(answer)), draw.random()
            if kind < 0.4:
                answer.insert(place, (draw.choice(MARKERS), True))
            elif kind < 0.7 and answer:
                del answer[min(place, len(answer) - 1)]
            elif kind < 0.9 and answer:
                answer.insert(place, draw.choice(answer))
            else:
                answer.insert(place, (draw.choice('"\\{}[],:\n\x00\ud800é5'), False))
        finish = draw.choice(("stop", "length"))
        found = parse(answer, finish, thinking=thinking, cuts=random_sizes(draw, sum(len(text) for text, _ in answer)))
        for i, (name, text) in enumerate(found.calls):
            text.encode()
            assert name in TOOLS
            if i in found.ended:
                assert isinstance(json.loads(text, parse_constant=pytest.fail), dict), (seed, answer)
            else:
                assert finish == "length" and i == len(found.calls) - 1
                assert is_beginning(text), (seed, text)


def random_sizes(draw: random.Random, length: int) -> list[int]:
    """Sizes of pieces, enough for a text of this length."""
    return draw.choices((1, 1, 2, 3, 7, 30), k=length)


def is_beginning(text: str) -> bool:
    """Whether a text is how some JSON object begins: one of a few endings makes it one."""
    for ending in ("}", '"}', "0}", '"a": 0}'):
        try:
            return isinstance(json.loads(text + ending), dict)
        except ValueError:
            continue
    return False
