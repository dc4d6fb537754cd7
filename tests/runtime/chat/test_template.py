"""Conversations: what is refused, what released templates get, and answers that go on with the last message."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from flint_runtime.chat.template import ChatTemplate, template_options
from flint_runtime.errors import UsageError
from tests.runtime.fake_core import TOKENIZER
from tests.shapes import NANO_DIRECTORY

ORACLE = AutoTokenizer.from_pretrained(NANO_DIRECTORY)
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC", "n": 2}'}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"properties": {"a": found}}
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [USER], "tools": "now"}, "tools must be a list"),
        ({"messages": [USER], "tools": TOOL}, "tools must be a list"),
        ({"messages": [USER], "tools": ["now"]}, r"tools\[0\] must be"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"messages": [USER], "tools": [{"name": "a", "parameters": {"not JSON": object()}}]}, "template rejects"),
        ({"messages": [USER], "tools": [{"name": "a", "parameters": nested(20_000)}]}, "nested too deeply"),
        ({"messages": [USER], "tools": [{"name": "a", "parameters": {"a": "\ud800"}}]}, "surrogate"),
        ({"messages": [USER], "chat_template": 5}, "chat_template must be a text"),
        ({"messages": [USER], "chat_template": "{% if %}"}, "chat_template is not valid"),
        ({"messages": [USER], "chat_template": "{{ " + "(" * 2000 + ")" * 2000 + " }}"}, "chat_template is not valid"),
        ({"messages": [USER], "chat_template": "{{ messages.x.y }}"}, "template rejects"),
        ({"messages": [USER], "chat_template": "{{ 1 / 0 }}"}, "template rejects.*zero"),
        ({"messages": [USER], "chat_template": "{{ messages[5]['a'] }}"}, "template rejects"),
        ({"messages": [USER], "chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "template rejects"),
        ({"messages": [USER], "chat_template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_no_conversation(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        TOKENIZER.render_chat(**arguments)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("x", "must map names"), ([1], "must map names"), ({1: 2}, "must map names"),
        *(({name: 1}, f"must not have {name}") for name in (
            "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"
        )),
        *(({name: value}, f"{name} must be true or false") for name in ("enable_thinking", "clear_thinking")
          for value in (0, 1, "false", [True])),
    ],
)  # fmt: skip
def test_what_are_no_template_options(kwargs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"chat_template_kwargs.*{message}"):
        template_options(kwargs)
    with pytest.raises(UsageError, match=f"default-chat-template-kwargs.*{message}"):
        template_options(None, defaults=kwargs)


@pytest.mark.parametrize("effort", [1, True, ["none"], "\ud800"])
def test_what_is_no_effort(effort: Any) -> None:
    with pytest.raises(UsageError, match="reasoning_effort"):
        template_options(None, reasoning_effort=effort)


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("kwargs", "effort", "defaults", "thinks"),
    [
        (None, None, None, True),
        ({}, None, {}, True),
        (OFF, None, None, False),
        (None, "none", None, False),
        *((None, word, None, True) for word in ("minimal", "low", "medium", "high", "xhigh", "max", "other", "")),
        (ON, "none", None, True),
        (OFF, "high", None, False),
        ({"reasoning_effort": "none"}, None, None, False),
        ({"reasoning_effort": "none"}, "high", None, True),
        ({"enable_thinking": None}, None, None, True),
        ({"enable_thinking": None}, "none", None, False),
        (None, None, OFF, False),
        (ON, None, OFF, True),
        ({"enable_thinking": None}, None, OFF, False),
        (None, "high", OFF, True),
        (None, "none", ON, False),
        (None, None, {"reasoning_effort": "none"}, False),
        (None, "low", {"reasoning_effort": "none"}, True),
        (ON, None, {"reasoning_effort": "none"}, True),
    ],
)
def test_who_says_whether_to_think(
    kwargs: dict[str, Any] | None, effort: str | None, defaults: dict[str, Any] | None, thinks: bool
) -> None:
    """The request before the server's defaults, and in each enable_thinking before the effort."""
    options = template_options(kwargs, reasoning_effort=effort, defaults=defaults)
    assert TOKENIZER.render_chat([USER], **options).endswith("<think>" if thinks else "</think>")


def test_defaults_hold_one_by_one() -> None:
    defaults = {"clear_thinking": False, "enable_thinking": False, "tone": "dry"}
    found = template_options({"tone": "warm"}, reasoning_effort="low", defaults=defaults)
    assert found == {"clear_thinking": False, "enable_thinking": True, "tone": "warm", "reasoning_effort": "low"}
    assert defaults == {"clear_thinking": False, "enable_thinking": False, "tone": "dry"}, "nobody's are changed"


@pytest.mark.parametrize("name", ["params", "request_id", "prompt", "source", "documents", "eos_token"])
def test_any_other_option_reaches_the_template(name: str) -> None:
    found = TOKENIZER.render_chat([USER], chat_template="{{ " + name + " }}", **template_options({name: "here"}))
    assert found == "here"


def test_released_templates_get_what_they_read() -> None:
    """They read reasoning_content, ask arguments for their items, and drop roles that they do not know."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.reasoning_content }}"
        "{% for call in m.tool_calls %}{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
        "{% endfor %}|{% endfor %}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
    ]
    found = TOKENIZER.render_chat(messages, chat_template=template)
    assert found == "system:be brief:|assistant::whyzone=UTC;n=2;|assistant::|"
    assert messages[1]["content"] is None and messages[0]["role"] == "developer", "the caller's are not changed"
    assert "\ud800" not in TOKENIZER.render_chat([{"role": "assistant", "tool_calls": [CALL]}, USER])


@pytest.mark.parametrize(
    "content",
    ["Paris is", " Paris  is ", "a</think>b", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]],
)
def test_continue_final_message_as_transformers(content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    found = TOKENIZER.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    whole = TOKENIZER.render_chat(messages, add_generation_prompt=False)
    assert found.rstrip() == whole, "this template writes nothing behind a message"
    if isinstance(content, str):
        expected = ORACLE.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False, continue_final_message=True
        )
        assert found.rstrip() == expected.rstrip()
        assert found.endswith(content[-5:]), "white space at the end is the message's own"


def test_what_stands_behind_the_last_message_is_cut_off() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
    found = TOKENIZER.render_chat(
        [USER, {"role": "assistant", "content": "Sure: "}],
        chat_template=template, add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    assert found == "<user>hi<end>\n<assistant>Sure: "


@pytest.mark.parametrize(
    ("last", "options", "message"),
    [
        ({"role": "assistant", "content": "a"}, {"add_generation_prompt": True}, "add_generation_prompt=False"),
        ({"role": "assistant", "content": "a", "tool_calls": [CALL]}, {}, "tool_calls"),
        ({"role": "assistant", "content": "a"}, {"chat_template": "nothing"}, "does not print the last message once"),
        (
            {"role": "assistant", "content": "a"},
            {"chat_template": "{{ messages[-1].content * 2 }}"},
            "does not print the last message once",
        ),
    ],
)
def test_what_cannot_be_continued(last: dict[str, Any], options: dict[str, Any], message: str) -> None:
    given = {"add_generation_prompt": False, "continue_final_message": True, **options}
    with pytest.raises(UsageError, match=message):
        TOKENIZER.render_chat([USER, last], **given)


@pytest.mark.parametrize(
    "constant", ["'%99999999999d' % 1", "'x' * 10**11", "'x' | center(10**11)", "range(10**11) | sum"]
)
def test_constants_are_not_computed_while_a_template_is_compiled(constant: str) -> None:
    """`make fuzz SEED=one-2 ONLY=2866` did not end."""
    template = ChatTemplate(f"{{% if tools %}}{{{{ {constant} }}}}{{% endif %}}hi", {})
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 99999999", "a power in it"),
        ("(9 ** 1000) * (9 ** 1000)", "a product in it"),
        ("'x' * 10 ** 12", "a product in it"),
        ("10 ** 12 * [1]", "a product in it"),
        ("'%999999999d' % 1", "a format in it"),
        ("'%.999999999f' % 1", "a format in it"),
        ("'%(a)-999999999s' % {'a': 1}", "a format in it"),
        ("'%*d' % (10 ** 9, 1)", "a format in it"),
        ("'%999999999d' | format(1)", "a format in it"),
        ("'{:999999999}'.format(1)", "a format in it"),
        ("'{:{}}'.format(1, 10 ** 9)", "a format in it"),
        ("'{a:>999999999}'.format_map({'a': 1})", "a format in it"),
        ("'x'.ljust(10 ** 9)", "a width in it"),
        ("'x'.center(width=10 ** 9)", "a width in it"),
        ("'1'.zfill(10 ** 9)", "a width in it"),
        ("'\t'.expandtabs(10 ** 9)", "a width in it"),
        ("'x' | center(10 ** 9)", "a width in it"),
        ("'x\nx' | indent(width=10 ** 9)", "a width in it"),
        ("[1] | batch(10 ** 9, 0) | list", "a width in it"),
        ("{'a': 1} | tojson(indent=10 ** 9)", "a width in it"),
        ("1.5 | round(10 ** 9, 'ceil')", "a width in it"),
        ("range(10 ** 11) | list", "its ranges"),
    ],
)
def test_what_takes_memory_without_end_is_refused(expression: str, message: str) -> None:
    """`make fuzz SEED=gpu-6 ONLY=1760` took 2.8 GB."""
    template = ChatTemplate(f"{{{{ {expression} }}}}", {})
    with pytest.raises(UsageError, match=message):
        template.render([{"role": "user", "content": "hi"}])


def test_what_is_printed_is_bounded() -> None:
    template = ChatTemplate("{% set s = 'x' * 10 ** 6 %}{% for i in range(100) %}{{ s }}{% endfor %}", {})
    with pytest.raises(UsageError, match="it prints more than 67,108,864 characters"):
        template.render([{"role": "user", "content": "hi"}])
    template = ChatTemplate("{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}", {})
    for _ in range(2):  # every rendering begins anew
        with pytest.raises(UsageError, match="its ranges have more than 10,000,000 items"):
            template.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2 ** 10", "1024"),
        ("'ab' * 3", "ababab"),
        ("17 * 1700000000", "28900000000"),
        ("'* %s of %d%%, %05.1f' % ('all', 1700000000, 2.5)", "* all of 1700000000%, 002.5"),
        ("'{} {:>4} {a[0]}'.format(1700000000, 'x', a=[1])", "1700000000    x 1"),
        ("'%s' | format(10 ** 9)", "1000000000"),
        ("'x' | center(5)", "  x  "),
        ("1700000000.25 | round(1)", "1700000000.2"),
        ("range(3) | list", "[0, 1, 2]"),
        ("{'a': [1]} | tojson(indent=1)", '{\n "a": [\n  1\n ]\n}'),
    ],
)
def test_what_templates_compute_every_day(expression: str, text: str) -> None:
    assert ChatTemplate(f"{{{{ {expression} }}}}", {}).render([{"role": "user", "content": "hi"}]) == text
