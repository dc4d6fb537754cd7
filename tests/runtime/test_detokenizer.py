"""Text of a stream of tokens, and stop texts in it (S4, S5)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime.detokenizer import Detokenizer, StopMatcher
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.tokenizer import Tokenizer
from tests.shapes import NANO_DIRECTORY

TOKENIZER = Tokenizer(NANO_DIRECTORY)
LETTERS = {letter: TOKENIZER.encode(letter)[0] for letter in "abc"}


def stream(ids: list[int], params: SamplingParams, thinking: bool = False) -> tuple[list[str], str | None]:
    """The piece of every token up to the stop, then what is flushed; and the stop."""
    detokenizer, pieces = Detokenizer(TOKENIZER, params, thinking), []
    for token in ids:
        pieces.append(detokenizer.add(token))
        if detokenizer.stop_text is not None:
            return pieces, detokenizer.stop_text
    return [*pieces, detokenizer.finish()], detokenizer.stop_text


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What is left of a whole text: it ends at the stop that is complete first, at the longest of those."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_s4_a_stream_is_the_whole_text_up_to_the_stop(ids: list[int], skip: bool, data: st.DataObject) -> None:
    """Any tokens, with stops taken from the text itself; the thinking marks are another test's."""
    ids = [t for t in ids if t not in (TOKENIZER.thinking_start_id, TOKENIZER.thinking_end_id)]
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    stops = []
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(whole)))
        stops.append(whole[start : start + data.draw(st.integers(1, 6))] or "zzz")
    include = data.draw(st.booleans())
    params = SamplingParams(stop=stops, skip_special_tokens=skip, include_stop_str_in_output=include)
    pieces, stop = stream(ids, params)
    assert ("".join(pieces), stop) == cut(whole, stops, include)


@given(st.text("ab", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_s4_nothing_is_held_longer_than_a_possible_match(text: str, stops: list[str]) -> None:
    """At every token, what is out lacks exactly the longest ending that a stop begins with."""
    detokenizer, out, seen = Detokenizer(TOKENIZER, SamplingParams(stop=stops)), "", ""
    for letter in text:
        out += detokenizer.add(LETTERS[letter])
        seen += letter
        if detokenizer.stop_text is not None:
            return
        held = max(n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
        assert out == seen[: len(seen) - held]


def test_s4_examples() -> None:
    (token,) = TOKENIZER.encode("Paris")
    assert stream([token, token], SamplingParams(stop=["isPa"])) == (["Par", ""], "isPa")
    assert stream([token, token], SamplingParams(stop=["isPa"], include_stop_str_in_output=True)) == (
        ["Paris", "Pa"], "isPa",
    )  # fmt: skip
    assert stream([token], SamplingParams(stop=["ist"])) == (["Par", "is"], None)
    assert stream([token], SamplingParams(stop=["Paris", "ri"])) == (["Pa"], "ri")


def test_stop_of_a_character_in_several_tokens() -> None:
    ids = TOKENIZER.encode("é👩!")
    assert len(ids) > 3
    pieces, stop = stream(ids, SamplingParams(stop=["👩"]))
    assert "".join(pieces) == "é" and stop == "👩"


THINKING = "12 STOP 13</think>"


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        (THINKING + "fine STOP no", True, THINKING + "fine "),
        ("<think>" + THINKING + "fine STOP no", False, "<think>" + THINKING + "fine "),
        ("\n<think>" + THINKING + "fine STOP no", False, "\n<think>" + THINKING + "fine "),
        ("STOP13</think>STOP", True, "STOP13</think>"),
        # A stop does not reach from the thinking part into the content.
        ("ST</think>OP fine", True, "ST</think>OP fine"),
        # Thinking that never ends, and a mark in the middle of the answer.
        ("12 STOP 13", True, "12 STOP 13"),
        ("see <think>STOP", False, "see <think>"),
        ("plain STOP", False, "plain "),
    ],
)
def test_s5_stops_apply_to_content(text: str, thinking: bool, expected: str) -> None:
    pieces, _ = stream(TOKENIZER.encode(text), SamplingParams(stop=["STOP"]), thinking)
    assert "".join(pieces) == expected


def test_thinking_is_not_held_back() -> None:
    ids = TOKENIZER.encode("ab")
    assert stream(ids, SamplingParams(stop=["abc"]), thinking=True)[0] == [TOKENIZER.decode([t]) for t in ids] + [""]


def test_no_stop_before_min_tokens() -> None:
    ids = [LETTERS[letter] for letter in "abcabcabc"]
    for least, expected in ((0, "a"), (2, "abca"), (3, "abca"), (9, "abcabcabc")):
        pieces, _ = stream(ids, SamplingParams(stop=["bc"], min_tokens=least))
        assert "".join(pieces) == expected, least


@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=30))
@settings(max_examples=300, deadline=None)
def test_stop_matcher(text: str, stream: str) -> None:
    matcher = StopMatcher(text)
    for end, character in enumerate(stream, 1):
        found = matcher.feed(character)
        assert found == stream[:end].endswith(text)
        if found:
            return
        assert matcher.matched == max(n for n in range(len(text)) if stream[:end].endswith(text[:n]))
