"""Messages in every shape that clients send: what reaches the prompt, and what is refused by its place."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime.chat.messages import normalize_messages
from flint_runtime.errors import UsageError
from tests.runtime.fake_core import TOKENIZER

USER = {"role": "user", "content": "hi"}


def text_part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


def calling(*arguments: Any, **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": value}}
        for i, value in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def normalized(message: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(message)
    (_, found) = normalize_messages([USER, message])
    assert message == before, "the caller's is not changed"
    return found


def arguments_of(message: dict[str, Any]) -> list[Any]:
    return [call["function"]["arguments"] for call in normalized(message)["tool_calls"]]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ("hi", "messages must be a list"),
        (b"hi", "messages must be a list"),
        (None, "messages must be a list"),
        (5, "messages must be a list"),
        (USER, "messages must be a list"),
        ([], "must have a message"),
    ],
)
def test_what_are_no_messages(messages: Any, place: str) -> None:
    with pytest.raises(UsageError, match=place):
        normalize_messages(messages)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hi", r"messages\[1\] must be"),
        (None, r"messages\[1\] must be"),
        ([USER], r"messages\[1\] must be"),
        ({"content": "hi"}, r"messages\[1\] must have a role of .* found None"),
        ({"role": "use", "content": "hi"}, "found 'use'"),
        ({"role": "function", "name": "f", "content": "hi"}, "found 'function'"),
        ({"role": "User", "content": "hi"}, "found 'User'"),
        ({"role": ["user"], "content": "hi"}, r"found \['user'\]"),
        ({"role": 10**5000, "content": "hi"}, "found a int"),
        ({"role": "user"}, r"messages\[1\].content must be a text .* found None"),
        ({"role": "user", "contents": "hi"}, r"messages\[1\].content must be"),
        ({"role": "system"}, r"messages\[1\].content must be"),
        ({"role": "user", "content": 5}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": b"hi"}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": {"a": 1}}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": np.array([1])}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": False}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": [5]}, r"messages\[1\].content\[0\] must be a text part.* found 5"),
        ({"role": "user", "content": [None]}, r"content\[0\] must be a text part"),
        ({"role": "user", "content": [[text_part("a")]]}, r"content\[0\] must be a text part"),
        ({"role": "user", "content": [{"text": "a"}]}, r"content\[0\] must be a text part"),
        ({"role": "user", "content": [{"type": 5, "text": "a"}]}, r"content\[0\] must be a text part"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, r"content\[0\] must be a text part"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[1\].content\[0\].text must be"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, r"content\[0\].text must be"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, r"content\[0\].refusal must be"),
        ({"role": "user", "content": "\ud800"}, r"messages\[1\].content has half of a surrogate pair"),
        ({"role": "user", "content": [text_part("a"), text_part("\udfff")]}, r"content\[1\].text has half"),
        ({"role": "assistant", "content": "a", "reasoning_content": 5}, r"messages\[1\].reasoning_content must be"),
        ({"role": "assistant", "content": "a", "reasoning": ["x"]}, r"messages\[1\].reasoning must be"),
        ({"role": "assistant", "reasoning": "\ud800"}, r"messages\[1\].reasoning has half"),
        ({"role": "user", "content": "a", "reasoning": "x"}, r"messages\[1\] must have no reasoning"),
        ({"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}, r"messages\[1\] must have no tool_calls"),
        ({"role": "assistant", "tool_calls": "now"}, r"messages\[1\].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, r"messages\[1\].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [5]}, r"messages\[1\].tool_calls\[0\] must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, r"tool_calls\[0\] must be"),
        ({"role": "assistant", "tool_calls": [{"function": None, "name": "f"}]}, r"tool_calls\[0\] must be"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f"}, {"type": "custom", "custom": {"name": "f"}}]},
            r"tool_calls\[1\] must be",
        ),
        (calling(5), r"messages\[1\].tool_calls\[0\] must have arguments as"),
        (calling("{}", [1]), r"messages\[1\].tool_calls\[1\] must have arguments as"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, r"function_call must be left out"),
        ({"role": "assistant", "audio": {"id": "a"}}, r"messages\[1\].audio must be left out.*text only"),
        ({"role": "user", "content": "a", "images": ["AAAA"]}, r"messages\[1\].images must be left out.*text only"),
    ],
)  # fmt: skip
def test_what_would_not_reach_the_prompt(message: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        normalize_messages([USER, message])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image", "source": {}},
        {"type": "input_image", "image_url": "x"},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "input_file", "file_id": "x"},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "tool_result", "content": "x"},
        {"type": "image_url", "image_url": {"url": "x"}, "text": "a caption"},
        {"type": "Text", "text": "x"},
    ],
)
def test_parts_that_are_no_text_are_refused_by_place_and_type(role: str, part: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Flint reads text only") as caught:
        normalize_messages([USER, {"role": role, "content": [text_part("a"), part]}])
    assert "messages[1].content[1]" in str(caught.value) and repr(part["type"]) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        (" a\n", " a\n"),
        (None, ""),
        ([], ""),
        ((), ""),
        ([text_part("one"), text_part(" two")], "one two"),
        ([text_part("")], ""),
        (["one", text_part("two")], "onetwo"),
        ([text_part("a", "input_text"), text_part("b", "output_text")], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{**text_part("a"), "cache_control": {"type": "ephemeral"}, "annotations": []}], "a"),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_content_is_one_text(role: str, content: Any, text: str) -> None:
    found = normalized({"role": role, "content": content})
    assert found == {"role": "system" if role == "developer" else role, "content": text}


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_content_may_be_left_out(role: str) -> None:
    assert normalized({"role": role})["content"] == ""


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_refusal_is_what_the_assistant_said(content: dict[str, Any]) -> None:
    assert normalized({"role": "assistant", **content, "refusal": "I will not."})["content"] == "I will not."
    assert normalized({"role": "assistant", **content, "refusal": None})["content"] == ""
    assert normalized({"role": "assistant", "content": "yes", "refusal": None})["content"] == "yes"


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, None),
        ({"reasoning": None, "reasoning_content": None}, None),
        ({"reasoning": ""}, None),
        ({"reasoning": "why"}, "why"),
        ({"reasoning_content": "why"}, "why"),
        ({"reasoning": "why", "reasoning_content": "why"}, "why"),
        ({"reasoning": "why", "reasoning_content": None}, "why"),
        ({"reasoning": "why", "reasoning_content": ""}, "why"),
        ({"reasoning": "", "reasoning_content": "why"}, "why"),
        ({"reasoning": "one", "reasoning_content": "other"}, "other"),
    ],
)
def test_g13_reasoning_is_taken_by_either_name(fields: dict[str, Any], reasoning: str | None) -> None:
    found = normalized({"role": "assistant", "content": "a", **fields})
    both = {} if reasoning is None else {"reasoning": reasoning, "reasoning_content": reasoning}
    assert found == {"role": "assistant", "content": "a", **both}
    prompt = TOKENIZER.render_chat([USER, {"role": "assistant", "content": "a", **fields}])
    assert (f"<think>{reasoning}</think>" in prompt) == (reasoning is not None)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ("", {}),
        ("  \n", {}),
        ("{}", {}),
        ({}, {}),
        ('{"b": 1, "a": {"c": [1.5, null, true, "x"]}}', {"b": 1, "a": {"c": [1.5, None, True, "x"]}}),
        ({"b": 1, "a": {"c": [None]}}, {"b": 1, "a": {"c": [None]}}),
        ('{"a": "  two\\n\\tlines <&\\u00e9\\ud83d\\ude00"}', {"a": "  two\n\tlines <&é😀"}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        (f'{{"a": {10**30}}}', {"a": 10**30}),
        ('{"\\ud800": ["\\udfff!", "\\ud83d\\ude00"]}', {"\ufffd": ["\ufffd!", "😀"]}),
    ],
)
def test_arguments_become_an_object(given: Any, found: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert arguments_of(calling(given)) == [found]
    assert list(arguments_of(calling(given))[0]) == list(found), "in the model's order"
    assert not caplog.records
    flat = normalized({"role": "assistant", "tool_calls": [{"name": "f", "arguments": given}]})
    assert flat["tool_calls"] == [{"name": "f", "arguments": found}]


MALFORMED = [
    '{"command": "rm -rf /tmp/x', '{"a": 1', "{", "nonsense", "[1]", '"x"', "5", "true", "null", "{'a': 1}",
    '{"a": 1} x', '"{\\"a\\": 1}"', '{"a":' * 100_000, "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\x00",
    '{"a": "\n"}',
]  # fmt: skip


@pytest.mark.parametrize("given", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_arguments_end_no_conversation(given: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such as those of a call that the token limit cut off, which never look complete."""
    with caplog.at_level(logging.WARNING):
        assert arguments_of(calling('{"a": 1}', given, given)) == [{"a": 1}, {}, {}]
    (record,) = caplog.records
    assert "2 calls" in record.getMessage() and "messages[1].tool_calls[1]" in record.getMessage()
    assert len(record.getMessage()) < 400
    prompt = TOKENIZER.render_chat([USER, calling(given), {"role": "tool", "content": "failed"}])
    assert prompt.endswith(
        "<tool_call>f</tool_call><|observation|><tool_response>failed</tool_response><|assistant|><think>"
    )


def test_other_fields_stay() -> None:
    """A template of the user's own may read them; what clients copy from answers does no harm."""
    fields: dict[str, Any] = {
        "name": "bob",
        "tool_call_id": "call_1",
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    assert normalized({"role": "tool", "content": "a", "tool_calls": None, **fields}) == {
        "role": "tool", "content": "a", **fields
    }  # fmt: skip


RESULTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([{"content": "18 °C"}], "<tool_response>18 °C</tool_response>"),
    "parts": ([{"content": [text_part("18"), text_part(" °C")]}], "<tool_response>18 °C</tool_response>"),
    "json": ([{"content": '{"t": 18}'}], '<tool_response>{"t": 18}</tool_response>'),
    "empty text": ([{"content": ""}], "<tool_response></tool_response>"),
    "no parts": ([{"content": []}], "<tool_response></tool_response>"),
    "null": ([{"content": None}], "<tool_response></tool_response>"),
    "nothing": ([{}], "<tool_response></tool_response>"),
    "parallel": (
        [{"content": "one"}, {"content": []}, {"content": [text_part("three")]}, {"content": "four"}],
        "<tool_response>one</tool_response><tool_response></tool_response><tool_response>three</tool_response>"
        "<tool_response>four</tool_response>",
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_g14_tool_results_reach_the_prompt_complete_and_in_order(name: str) -> None:
    results, expected = RESULTS[name]
    messages = [
        USER,
        calling(*["{}"] * len(results)),
        *({"role": "tool", "tool_call_id": f"call_{i}", **result} for i, result in enumerate(results)),
        {"role": "user", "content": "and now?"},
    ]
    prompt = TOKENIZER.render_chat(messages)
    assert f"</tool_call><|observation|>{expected}<|user|>and now?" in prompt


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.lists(st.text(max_size=8), max_size=4))
def test_whatever_comes_prints_as_objects_and_texts_do(arguments: dict[str, Any], texts: list[str]) -> None:
    """As JSON text or object, as parts or a text: the prompt is the same."""
    one = [USER, calling(arguments), {"role": "tool", "content": "".join(texts)}]
    other = [USER, calling(json.dumps(arguments)), {"role": "tool", "content": [text_part(t) for t in texts]}]
    assert TOKENIZER.render_chat(one) == TOKENIZER.render_chat(other)
