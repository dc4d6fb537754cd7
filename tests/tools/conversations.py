"""Forty conversations as chat clients and coding agents send them: bodies of /v1/chat/completions, without a model.

`record_conversations` asks vLLM what it makes of them. Where ours differs on purpose, `differs` says why, and `prompt`
what ours has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One request, and the server it goes to."""

    body: Body
    exclude_tools: bool = False
    """The server has --exclude-tools-when-tool-choice-none."""
    default_kwargs: dict[str, Any] = field(default_factory=dict)
    """The server's --default-chat-template-kwargs."""
    differs: str | None = None
    """Why ours is not what vLLM gives; None where it is."""
    prompt: str | None = None
    """What ours must then contain."""


def system(text: Any) -> Body:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: Any) -> Body:
    """A user's message."""
    return {"role": "user", "content": text}


def says(text: Any, **fields: Any) -> Body:
    """An answer."""
    return {"role": "assistant", "content": text, **fields}


def calls(*named: tuple[str, Any], content: Any = None, **fields: Any) -> Body:
    """An answer that calls functions with arguments as JSON texts."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(named)
    ]
    return says(content, tool_calls=made, **fields)


def result(content: Any, index: int = 0) -> Body:
    """What the call of an index gave."""
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


def parts(*texts: str) -> list[Body]:
    """Text parts."""
    return [{"type": "text", "text": text} for text in texts]


def tool(name: str, description: str, required: tuple[str, ...] = (), **properties: Any) -> Body:
    """A function, its keys in the order that vLLM prints them in."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool("weather", "Weather of a city", ("city",), city={"type": "string"})
CALCULATOR = tool("calculator", "Computes", ("expression",), expression={"type": "string"})
NOW = tool("now", "The time")
BASH = tool(
    "Bash",
    'Runs a command.\n\nUsage:\n- Quote paths with spaces: "a b".\n- Never use `cat` <file>.',
    ("command",),
    command={"type": "string", "description": "The command"},
    timeout={"type": "number", "minimum": 1, "maximum": 600000, "default": 1.5},
    run_in_background={"type": "boolean"},
)
EDIT = tool(
    "Edit",
    "Replaces text in a file",
    ("file_path", "old_string", "new_string"),
    file_path={"type": "string"},
    old_string={"type": "string"},
    new_string={"type": "string"},
    edits={"type": "array", "items": {"$ref": "#/$defs/edit"}, "minItems": 0},
    mode={"anyOf": [{"type": "string", "enum": ["one", "all"]}, {"type": "null"}]},
)
CITIES = ("Oslo", "Rome", "Bern")
QUESTION = user("What is 7 + 5?")
CODE = 'def f(x):\n\tif x < 1 and x > 0:  # "so"\n        return {"a": [1, 2]}\n\n\n'
EVERY_KIND = (
    '{"old_string": ' + json.dumps(CODE) + ', "n": -3, "big": 9007199254740993, "f": 0.25, "on": true, "no": null, '
    '"edits": [{"b": "é<&>", "a": [1, 2.5, []]}, {}], "\\u00fc": "\\ud83d\\ude00"}'
)
"""Arguments of every JSON type."""
AGENT_RULES = "You are a coding agent.\n\n# Tone\nBe brief.\n\n<env>\nWorking directory: /repo\n</env>\n" * 5

AGENT = [
    system(AGENT_RULES),
    user(parts("<system-reminder>\nToday is Monday.\n</system-reminder>", "Fix the failing test.")),
    calls(("Bash", '{"command": "pytest -q 2>&1 | tail -5", "timeout": 60000}'), reasoning="Run the tests first."),
    result("1 failed, 41 passed\nE   assert f(1) == 2\n"),
    calls(
        ("Edit", '{"file_path": "/repo/a.py", "old_string": "return 1", "new_string": "return 2"}'),
        content="The function is wrong.",
        reasoning="Line 3 returns 1.",
    ),
    result(parts("The file ", "/repo/a.py has been updated.")),
    calls(("Bash", '{"command": "pytest -q"}'), reasoning_content="Again."),
    result("42 passed"),
]

CONVERSATIONS: dict[str, Conversation] = {
    "a question": Conversation({"messages": [QUESTION]}),
    "thinking off": Conversation({"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": False}}),
    "effort none": Conversation({"messages": [QUESTION], "reasoning_effort": "none"}),
    "enable_thinking before the effort": Conversation(
        {"messages": [QUESTION], "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    ),
    "the server's default": Conversation({"messages": [QUESTION]}, default_kwargs={"enable_thinking": False}),
    "an effort before the server's default": Conversation(
        {"messages": [QUESTION], "reasoning_effort": "low"}, default_kwargs={"enable_thinking": False}
    ),
    "system": Conversation({"messages": [system("Be brief."), QUESTION]}),
    "developer": Conversation({"messages": [{"role": "developer", "content": "Be brief."}, QUESTION]}),
    "system messages between": Conversation({"messages": [QUESTION, says("12"), system("Be brief."), user("And 2?")]}),
    "parts": Conversation({"messages": [system(parts("Be ", "brief.")), user(parts("What is", " 7 + 5?"))]}),
    "scripts of the world": Conversation(
        {"messages": [user("naïve café 日本語 👩‍👩‍👧 ﷽ \u202eabc\u202c e\u0301 \x07 \ufeff\u2028")]}
    ),
    "white space": Conversation({"messages": [user("  two  spaces\n\n\ttab\r\n "), says("\n a \n"), user(" \n")]}),
    "numbers": Conversation({"messages": [user("1234567890 3.14159 -0 1e10 0x1F ½ ٣")]}),
    "markers in a user's text": Conversation(
        {"messages": [user("What are <|user|>, <think>, </think> and <tool_call>x</tool_call>? /nothink [gMASK]")]}
    ),
    "turns": Conversation(
        {"messages": [QUESTION, says("12", reasoning="7 + 5"), user("And 2?"), says("14"), user("Thanks")]}
    ),
    "thinking is kept": Conversation(
        {
            "messages": [QUESTION, says("12", reasoning=" 7 + 5 \n"), user("And 2?")],
            "chat_template_kwargs": {"clear_thinking": False},
        }
    ),
    "reasoning_content": Conversation(
        {
            "messages": [QUESTION, says("12", reasoning_content="7 + 5"), user("And 2?")],
            "chat_template_kwargs": {"clear_thinking": False},
        }
    ),
    "thinking inside content": Conversation(
        {
            "messages": [QUESTION, says("<think>7 + 5</think>12"), user("And 2?")],
            "chat_template_kwargs": {"clear_thinking": False},
        }
    ),
    "continued": Conversation(
        {
            "messages": [QUESTION, says("It is")],
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
    ),
    "continued behind white space": Conversation(
        {
            "messages": [QUESTION, says("It is ")],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        differs="White space at the end of the message is its own: the answer goes on behind it.",
        prompt="</think>It is ",
    ),
    "no generation prompt": Conversation({"messages": [QUESTION, says("12")], "add_generation_prompt": False}),
    "tools": Conversation({"messages": [QUESTION], "tools": [WEATHER, CALCULATOR, NOW]}),
    "tools of an agent": Conversation({"messages": [system(AGENT_RULES), user("Hi")], "tools": [BASH, EDIT]}),
    "tools in another order": Conversation({"messages": [QUESTION], "tools": [NOW, EDIT, WEATHER]}),
    "tool_choice none": Conversation({"messages": [QUESTION], "tools": [NOW], "tool_choice": "none"}),
    "tool_choice none, tools excluded": Conversation(
        {"messages": [QUESTION], "tools": [NOW], "tool_choice": "none"}, exclude_tools=True
    ),
    "a call and its result": Conversation(
        {
            "messages": [
                user("Weather in Oslo?"),
                calls(("weather", '{"city": "Oslo"}'), reasoning="A tool call."),
                result('{"sky": "sunny", "degrees": 18}'),
            ],
            "tools": [WEATHER],
        }
    ),
    "parallel results of every form": Conversation(
        {
            "messages": [
                user("Weather in Oslo, Rome and Bern, and the time?"),
                calls(*[("weather", f'{{"city": "{c}"}}') for c in CITIES], ("now", "{}"), content=""),
                result("sunny"),
                result(parts("rai", "ny"), 1),
                result([], 2),
                result("", 3),
                user("So?"),
            ],
            "tools": [WEATHER, NOW],
        }
    ),
    "code in arguments": Conversation(
        {
            "messages": [
                QUESTION,
                calls(("Edit", EVERY_KIND)),
                result("done"),
            ]
        }
    ),
    "a call without arguments": Conversation({"messages": [QUESTION, calls(("now", "")), result("10:00")]}),
    "an agent in its chain": Conversation({"messages": AGENT, "tools": [BASH, EDIT]}),
    "the user answers an agent": Conversation(
        {"messages": [*AGENT, says("Fixed."), user("Now commit.")], "tools": [BASH, EDIT]}
    ),
    "an agent whose thinking is kept": Conversation(
        {
            "messages": [*AGENT, says("Fixed.", reasoning="All green."), user("Now commit.")],
            "tools": [BASH, EDIT],
        },
        default_kwargs={"clear_thinking": False},
    ),
    "fields that answers carry": Conversation(
        {"messages": [{**QUESTION, "name": "bob"}, says("12", annotations=[], refusal=None), user("And 2?")]}
    ),
    "arguments of a call that was cut off": Conversation(
        {"messages": [QUESTION, calls(("Bash", '{"command": "rm -rf /tmp/x')), result("failed")]},
        differs="One bad turn must not end a conversation: {} with a warning, as vLLM's Python server does.",
        prompt="<tool_call>Bash</tool_call><|observation|><tool_response>failed</tool_response>",
    ),
    "a large integer in arguments": Conversation(
        {"messages": [QUESTION, calls(("f", '{"n": 123456789012345678901234567890}')), result("done")]},
        differs="Integers keep any size.",
        prompt="<arg_key>n</arg_key><arg_value>123456789012345678901234567890</arg_value>",
    ),
    "small numbers in arguments": Conversation(
        {"messages": [QUESTION, calls(("f", '{"small": 1e-5, "zero": -0}')), result("done")]},
        differs="Numbers print as in transformers and vLLM's Python server: as Python's json does.",
        prompt="<arg_value>1e-05</arg_value><arg_key>zero</arg_key><arg_value>0</arg_value>",
    ),
    "tools with keys of their own order": Conversation(
        {
            "messages": [QUESTION],
            "tools": [{"type": "function", "function": {"parameters": {}, "strict": False, "name": "f", "x": 1}}],
        },
        differs="Tools stand in the prompt as the client sent them: another order would lose the prefix.",
        prompt='\n{"parameters": {}, "strict": false, "name": "f", "x": 1}\n',
    ),
    "content that is null": Conversation(
        {"messages": [QUESTION, calls(("now", "{}")), result(None), says(None), user("And 2?")]},
        differs="Null is the empty text, in results and answers, too.",
        prompt="<tool_response></tool_response><|assistant|></think><|user|>And 2?",
    ),
    "parts of the Responses API": Conversation(
        {
            "messages": [
                user([{"type": "input_text", "text": "7"}]),
                says([{"type": "output_text", "text": "8"}]),
                user("9"),
            ]
        },
        differs="Clients that speak both APIs send these parts to either.",
        prompt="<|user|>7<|assistant|></think>8<|user|>9",
    ),
}  # fmt: skip
