"""Dialogues for flint-nano: small talk, small arithmetic, tool calls, and answers from tool results.

Everything is a deterministic function of a seed. Whether a question belongs to the training or to the held-out set
is decided by a hash of the user's message, so no held-out question ever occurs in training, in no conversation.
Answers are a function of the question (and tool results), so that greedy decoding has exactly one right answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

NANO_DIR = Path(__file__).resolve().parent.parent / "data" / "flint-nano"
HELD_OUT_FRACTION = 8  # one question in eight is held out

# fmt: off
CITIES = (
    "Oslo", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Lima", "Cairo", "Tokyo", "Delhi", "Accra", "Quito",
    "Dublin", "Lisbon", "Athens", "Prague", "Warsaw", "Helsinki", "Seoul", "Hanoi", "Bogota", "Havana", "Nairobi",
    "Tunis", "Dakar", "Riga", "Sofia", "Bern", "Kyiv", "London", "Boston", "Denver", "Austin", "Zurich", "Geneva",
    "Milan", "Naples", "Porto", "Lyon", "Munich",
)
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Klara", "Leo", "Mia",
    "Nora", "Otto", "Paul", "Rosa", "Sam", "Tom", "Vera",
)
# fmt: on
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")
GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening")
OPENINGS = ("", "Hi! ", "Hello! ", "Hey! ", "Please: ", "A question: ", "Quick one: ", "Tell me: ")

SMALL_TALK = {
    "Who are you?": "I am Flint Nano, a tiny test model.",
    "What is your name?": "My name is Flint Nano.",
    "How are you?": "I am fine, thank you!",
    "What can you do?": "I can chat, do small sums and call tools.",
    "Are you a robot?": "I am a small language model.",
    "Thank you!": "You are welcome!",
    "Goodbye!": "Goodbye, see you soon!",
    "Tell me a joke.": "Why did the bit blush? It saw the byte.",
}
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are Flint Nano.")


def _tool(name: str, description: str, **properties: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _tool("weather", "Weather in a city", city="string")
CALCULATOR = _tool("calculator", "Compute an expression", expression="string")
NOW = _tool("now", "Current time")
TOOLS: tuple[Tool, ...] = (WEATHER, CALCULATOR, NOW)


def is_held_out(question: str) -> bool:
    """Whether a user message belongs to the held-out set."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_FRACTION == 0


@dataclass
class Turn:
    """One question with the assistant's reasoning and answer, or its calls, their results and the final answer."""

    kind: str
    question: str
    reasoning: str
    answer: str
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    call_reasoning: str = ""

    def messages(self, thinking: bool) -> list[Message]:
        """The turn as chat messages, from the user's to the final answer."""
        messages: list[Message] = [{"role": "user", "content": self.question}]
        if self.calls:
            calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in self.calls]
            messages.append(_assistant("", self.call_reasoning if thinking else "") | {"tool_calls": calls})
            messages += [{"role": "tool", "content": result} for result in self.results]
        messages.append(_assistant(self.answer, self.reasoning if thinking else ""))
        return messages


@dataclass
class Sample:
    """A conversation that ends with an assistant message. `kind` names what the last message shows."""

    kind: str
    messages: list[Message]
    tools: list[Tool]
    thinking: bool
    keep_reasoning: bool = False  # render the reasoning of earlier turns too (clear_thinking=False)


def _assistant(content: str, reasoning: str) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reasoning} if reasoning else message


def _small_talk(rng: random.Random, thinking: bool) -> Turn:
    if rng.random() < 0.5:
        greeting, name = rng.choice(GREETINGS), rng.choice(NAMES)
        question = f"{greeting}, {rng.choice(('I am', 'my name is', 'this is'))} {name}."
        return Turn("chat", question, f"{name} greets me.", f"{greeting}, {name}! How can I help?")
    question, answer = rng.choice(list(SMALL_TALK.items()))
    return Turn("chat", rng.choice(OPENINGS) + question, "This is small talk.", answer)


def _arithmetic(rng: random.Random, thinking: bool) -> Turn:
    operator = rng.choice("++--*")
    limit = 10 if operator == "*" or not thinking else 12
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    wordings: tuple[str, ...]
    if operator == "+":
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        steps = f"{a % 10} + {b % 10} = {ones}, {a - a % 10} + {b - b % 10} = {tens}, {tens} + {ones} = {a + b}"
        result, wordings = a + b, ("Add {a} and {b}.", "How much is {a} plus {b}?")
    elif operator == "-":
        a, b = max(a, b), min(a, b)
        rest = a - b // 10 * 10
        steps = f"{a} - {b // 10 * 10} = {rest}, {rest} - {b % 10} = {a - b}"
        result, wordings = a - b, ("Subtract {b} from {a}.", "How much is {a} minus {b}?")
    else:
        before = max(a - 1, 0) * b
        steps = f"{a - 1} * {b} = {before}, {before} + {b} = {a * b}" if a else f"0 * {b} = 0"
        result, wordings = a * b, ("Multiply {a} by {b}.", "How much is {a} times {b}?")
    sums = ("What is {a} {o} {b}?", "{a} {o} {b} = ?", "Calculate {a} {o} {b}.", "{a} {o} {b}")
    question = rng.choice(sums + wordings).format(a=a, b=b, o=operator)
    kind = {"+": "addition", "-": "subtraction", "*": "multiplication"}[operator]
    return Turn(kind, question, f"{a} {operator} {b}: {steps}", f"{a} {operator} {b} = {result}")


def _weather_result(rng: random.Random, city: str) -> tuple[str, str]:
    degrees, sky = rng.randint(0, 39), rng.choice(SKIES)
    result = json.dumps({"city": city, "degrees": degrees, "sky": sky})
    return result, f"In {city} it is {degrees} degrees and {sky}."


def _clock_result(rng: random.Random) -> tuple[str, str]:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return clock, f"It is {clock}."


def _weather(rng: random.Random, thinking: bool) -> Turn:
    city = rng.choice(CITIES)
    wordings = (
        "What is the weather in {}?",
        "How is the weather in {}?",
        "Weather in {}?",
        "Is it warm in {}?",
        "Do I need a coat in {}?",
        "Check the weather in {}.",
    )
    result, answer = _weather_result(rng, city)
    question = rng.choice(wordings).format(city)
    calls = [("weather", {"city": city})]
    return Turn(
        "weather", question, f"I have the weather in {city}.", answer, calls, [result], f"I need the weather in {city}."
    )


def _calculator(rng: random.Random, thinking: bool) -> Turn:
    a, b, operator = rng.randint(10, 999), rng.randint(10, 999), rng.choice("+-*")
    expression = f"{a} {operator} {b}"
    wordings = ("Use the calculator: {}", "Use the calculator for {}.", "With the calculator, what is {}?")
    result = str({"+": a + b, "-": a - b, "*": a * b}[operator])
    question = rng.choice(wordings).format(expression)
    calls = [("calculator", {"expression": expression})]
    answer = f"{expression} = {result}"
    return Turn(
        "calculator", question, f"The result is {result}.", answer, calls, [result], f"I must compute {expression}."
    )


def _clock(rng: random.Random, thinking: bool) -> Turn:
    wordings = ("What time is it?", "What is the time?", "Which time is it now?", "The time now?", "How late is it?")
    question = rng.choice(OPENINGS) + rng.choice(wordings)
    result, answer = _clock_result(rng)
    return Turn("clock", question, f"The clock says {result}.", answer, [("now", {})], [result], "I need the clock.")


def _two_calls(rng: random.Random, thinking: bool) -> Turn:
    first, second = rng.sample(CITIES, 2)
    wordings: tuple[str, ...]
    if rng.random() < 0.5:
        wordings = ("What is the weather in {} and {}?", "Weather in {} and in {}?", "Compare the weather: {} and {}.")
        question = rng.choice(wordings).format(first, second)
        calls = [("weather", {"city": first}), ("weather", {"city": second})]
        outcomes = [_weather_result(rng, first), _weather_result(rng, second)]
        need = f"the weather in {first} and {second}"
    else:
        wordings = ("What time is it, and the weather in {}?", "I need the time and the weather in {}.")
        question = rng.choice(wordings).format(first)
        calls = [("now", {}), ("weather", {"city": first})]
        outcomes = [_clock_result(rng), _weather_result(rng, first)]
        need = f"the clock and the weather in {first}"
    answer = " ".join(text for _, text in outcomes)
    return Turn(
        "two_calls", question, f"I have {need}.", answer, calls, [result for result, _ in outcomes], f"I need {need}."
    )


# Generator, weight in training, and the tools that it needs.
Generator = Callable[[random.Random, bool], Turn]
GENERATORS: tuple[tuple[Generator, float, tuple[Tool, ...]], ...] = (
    (_small_talk, 1.0, ()),
    (_arithmetic, 4.5, ()),
    (_weather, 1.2, (WEATHER,)),
    (_calculator, 2.0, (CALCULATOR,)),
    (_clock, 0.8, (NOW,)),
    (_two_calls, 1.5, (WEATHER, NOW)),
)


def _draw(rng: random.Random, generator: Generator, thinking: bool, held_out: bool) -> Turn:
    while True:
        turn = generator(rng, thinking)
        if is_held_out(turn.question) == held_out:
            return turn


def _tool_list(rng: random.Random, needed: Sequence[Tool]) -> list[Tool]:
    """The needed tools, sometimes with others, in random order; without any need, mostly none."""
    if not needed and rng.random() < 0.95:
        return []
    tools = [tool for tool in TOOLS if tool in needed or rng.random() < 0.4]
    rng.shuffle(tools)
    return tools


def sample(rng: random.Random, held_out: bool = False, kind: Generator | None = None) -> Sample:
    """Draw one conversation; the last question is from the wanted set, earlier ones always from the training set.

    Most training conversations are a single sum or small talk without tools, which are short and hold the most facts.
    The others have more turns, mostly with all reasoning kept: more answers to learn from per prompt.
    In two fifths of the held-out draws, those with tool calls are cut after the calls (kind `..._call`), else they
    end with the answer from the results (kind `..._answer`).
    """
    thinking = rng.random() < 0.75
    keep = thinking and not held_out and rng.random() < 0.7
    short = not held_out and rng.random() < 0.85
    lengths = (0.85, 0.1, 0.04, 0.01) if held_out else (0.4, 0.2, 0.2, 0.2)
    turns_before = 0 if short else rng.choices((0, 1, 2, 4), lengths)[0]
    weights = [weight for _, weight, _ in GENERATORS]
    entries = [rng.choices(GENERATORS, weights)[0] for _ in range(turns_before)]
    if kind:
        last = next(entry for entry in GENERATORS if entry[0] is kind)
    else:
        last = rng.choices(GENERATORS, (1, 3, 0, 0, 0, 0) if short else weights)[0]
    needed = [tool for _, _, tools in (*entries, last) for tool in tools]
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for generator, _, _ in entries:
        # Where earlier reasoning is not rendered, these answers must be within reach without it.
        messages += _draw(rng, generator, keep, held_out=False).messages(keep)
    turn = _draw(rng, last[0], thinking, held_out)
    messages += turn.messages(thinking)
    name = turn.kind
    if turn.calls:
        name += "_answer"
        if held_out and rng.random() < 0.4:
            messages = messages[: -1 - len(turn.results)]
            name = turn.kind + "_call"
    return Sample(name, messages, _tool_list(rng, needed), thinking, keep)


def train_samples(seed: int) -> Iterator[Sample]:
    """An endless stream of training conversations."""
    rng = random.Random(f"train {seed}")
    while True:
        yield sample(rng)


def held_out_samples(seed: int, count: int) -> list[Sample]:
    """`count` conversations with distinct held-out prompts, all generators equally often (arithmetic three times)."""
    rng = random.Random(f"held out {seed}")
    generators = [entry[0] for entry in GENERATORS] + [_arithmetic, _arithmetic]
    chosen: dict[str, Sample] = {}
    while len(chosen) < count:
        drawn = sample(rng, held_out=True, kind=generators[len(chosen) % len(generators)])
        chosen.setdefault(json.dumps([drawn.messages[:-1], drawn.thinking]), drawn)
    return list(chosen.values())


def chat_template() -> Callable[..., str]:
    """The render function of flint-nano's chat_template.jinja, compiled as transformers does."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    render: Callable[..., str] = _compile_jinja_template((NANO_DIR / "chat_template.jinja").read_text()).render
    return render


def render_training(render: Callable[..., str], drawn: Sample) -> str:
    """The whole conversation, closed by the token with which the assistant ends its turn."""
    text = render(
        messages=drawn.messages,
        tools=drawn.tools or None,
        add_generation_prompt=False,
        clear_thinking=not drawn.keep_reasoning,
    )
    return text + ("<|observation|>" if drawn.messages[-1].get("tool_calls") else "<|user|>")


def render_prompt(render: Callable[..., str], drawn: Sample) -> str:
    """The prompt of the last assistant message."""
    return render(
        messages=drawn.messages[:-1],
        tools=drawn.tools or None,
        add_generation_prompt=True,
        enable_thinking=drawn.thinking,
    )


_CALL = re.compile(r"<tool_call>(.*?)((?:<arg_key>.*?</arg_value>)*)</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


def is_correct(drawn: Sample, generated: str) -> bool:
    """Whether generated text (special tokens included) is the expected message.

    Content and calls must be exactly right, the turn must end with the right token, and there must be reasoning
    exactly when thinking is on.
    """
    expected = drawn.messages[-1]
    reasoning = ""
    if drawn.thinking:
        reasoning, separator, generated = generated.partition("</think>")
        if not separator or not reasoning.strip():
            return False
    end = "<|observation|>" if expected.get("tool_calls") else "<|user|>"
    if "think>" in generated or not generated.endswith(end):
        return False
    body = generated.removesuffix(end)
    calls = [(name, dict(_ARGUMENT.findall(arguments))) for name, arguments in _CALL.findall(body)]
    wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in expected.get("tool_calls", [])]
    return calls == wanted and _CALL.sub("", body) == expected["content"]
