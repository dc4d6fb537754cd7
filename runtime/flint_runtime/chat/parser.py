"""GlmParser: from an answer's tokens to reasoning, content and calls, the same for a stream and for a whole answer."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from flint_runtime.chat.argument_values import (
    STRING,
    ArgumentTypes,
    escaped,
    object_to_json,
    quoted,
    read_json,
    to_json,
)
from flint_runtime.chat.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from flint_runtime.chat.tools import FunctionTool
from flint_runtime.request import FinishReason
from flint_runtime.tokenizer import Tokenizer


class _State(Enum):
    PROSE = auto()
    """Reasoning or content."""
    NAME = auto()
    JSON = auto()
    """A call that is written as one JSON object."""
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()
    SKIPPED_VALUE = auto()
    """It has no key, or one that came before."""
    BETWEEN = auto()
    """Behind a value."""
    VERBATIM = auto()
    """In a call of a function that nobody declared: it is prose, markup and all."""
    VERBATIM_VALUE = auto()


class GlmParser:
    """Parses one answer in the format of GLM-4.5 and GLM-4.7.

    White space is dropped at both ends of each reasoning part, and of content beside a marker. A call of an undeclared
    function, and with `calls` off every call, is text of the part in which it stands. A call that the limit cut off is
    never closed; one that the model itself ended, however sloppily, is closed to valid JSON.

    An answer that the model ends without `</think>` was, for all that a stream could know, reasoning, and a stream
    cannot take back what it sent. So it stays reasoning, and as nothing else was answered, its text is content too, in
    one last event, in both modes alike: a client that reads only content gets the answer.

    Attributes:
        num_calls: calls that have begun.
        unfinished_call: after `finish`: whether the last call was cut off. Its finish_reason must be "length".
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Mapping[str, FunctionTool], *, thinking: bool, calls: bool = True
    ) -> None:
        """Start an answer.

        Args:
            tools: what may be called, by name.
            thinking: the prompt ends inside the thinking part, see Tokenizer.opens_thinking.
            calls: whether calls are looked for; off for tool_choice "none".
        """
        self._markers = tokenizer.markers
        self._no_text = frozenset(self._markers) | frozenset(tokenizer.eos_token_ids)
        self._tools, self._names, self._calls = tools, sorted(tools), calls
        self._events: list[Event] = []
        # Where the parser is in the text, and what it has not taken in: the beginning of a marker.
        self._offset, self._waiting = 0, ""
        self._marks: deque[tuple[int, int]] = deque()
        # Tokens before each marker that the text has not reached, and behind the last.
        self._runs: deque[tuple[int, int]] = deque()
        self._tail = self._settled = 0
        # Prose.
        self._state = _State.PROSE
        self._reasoning = thinking
        self._edge = thinking  # white space here is dropped
        self._space: list[str] = []  # it is dropped if a marker follows
        self._answered = False
        self._thought: list[str] = []
        # A call.
        self.num_calls = 0
        self.unfinished_call = False
        self._raw: list[str] = []
        self._name, self._name_ended = "", False
        self._types = ArgumentTypes({})
        self._keys: set[str] = set()
        self._pieces: list[str] = []  # of a key, or of a value that is sent when closed
        self._value_types: frozenset[str] | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, without markers."""
        return self._settled + (self._tail if self._reasoning and not self._runs else 0)

    def feed(self, text: str, token_ids: Sequence[int], marks: Sequence[tuple[int, int]]) -> list[Event]:
        """Take in more of the answer, as a CompletionOutput of kind DELTA has it: what is certain now."""
        for token in token_ids:
            if token not in self._no_text:
                self._tail += 1
            elif token in self._markers:
                self._runs.append((self._tail, token))
                self._tail = 0
        if marks:
            self._marks.extend(marks)
        if self._waiting:
            text, self._waiting = self._waiting + text, ""
        if self._marks:
            text = self._take_marked(text)
        if text:
            self._offset += len(text)
            self._take_text(text)
        events, self._events = self._events, []
        return events

    def finish(self, finish_reason: FinishReason, stop_reason: int | str | None = None) -> list[Event]:
        """Nothing more comes.

        Args:
            stop_reason: of the CompletionOutput: the client's own stop, which cuts a call off as the limit does.
        """
        if self._waiting:  # a marker that a stop text cut off
            self._take_text(self._waiting)
            self._waiting = ""
        ended = finish_reason == "stop"
        if self._state in (_State.NAME, _State.JSON):
            if ended and stop_reason is None:
                self._end_name()
            else:
                self._give_up_call()
        elif self._in_call():
            if ended and stop_reason is None:
                self._end_call()
            else:
                self.unfinished_call = True
        for count, _ in self._runs:
            self._tail += count
        self._runs.clear()
        if self._reasoning:
            if ended and not self._answered and self._thought:
                self._events.append(ContentText("".join(self._thought)))
        elif self._space and not self._edge:
            self._events.append(ContentText("".join(self._space)))
        self._space, self._thought = [], []
        events, self._events = self._events, []
        return events

    def _take_marked(self, text: str) -> str:
        """Take in text up to the last mark that is complete: what is left, if it is certain to be text."""
        base, taken = self._offset, 0
        while self._marks:
            offset, token = self._marks[0]
            start, marker = offset - base, self._markers.get(token, "")
            if start >= len(text):
                break
            if start < taken or not marker:
                self._marks.popleft()
                continue
            if start > taken:
                self._take_text(text[taken:start])
            end = start + len(marker)
            taken = start
            if end > len(text):
                self._waiting, self._offset = text[start:], base + start
                return ""
            self._marks.popleft()
            if text.startswith(marker, start):
                self._settle(token)
                self._take_marker(marker)
                taken = end
        self._offset = base + taken
        return text[taken:]

    def _settle(self, marker: int) -> None:
        """Count the tokens that stand before a marker."""
        reasoning = self._reasoning and self._state in (_State.PROSE, _State.VERBATIM, _State.VERBATIM_VALUE)
        while self._runs:
            count, token = self._runs.popleft()
            self._settled += count if reasoning else 0
            if token == marker:
                break

    def _in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._state in _IN_CALL

    def _take_text(self, text: str) -> None:
        state = self._state
        if state is _State.PROSE:  # first, and by identity: this is done for every token
            self._prose(text)
        elif state is _State.VALUE:
            if self._value_types is STRING:
                self._arguments(escaped(text))
            else:
                self._pieces.append(text)
        elif state in _IS_PROSE:
            self._prose(text)
        elif state is _State.NAME:
            self._take_name(text)
        elif state is _State.JSON:
            self._raw.append(text)
        elif state is _State.KEY:
            self._pieces.append(text)

    def _prose(self, text: str) -> None:
        if self._edge:
            text = text.lstrip()
            if not text:
                return
            self._edge = False
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return
        space = text[len(body) :]
        if self._space:
            body = "".join(self._space) + body
            self._space = []
        if space:
            self._space.append(space)
        if self._reasoning:
            self._events.append(ReasoningText(body))
            if not self._answered:
                self._thought.append(body)
        else:
            self._events.append(ContentText(body))
            self._answer()

    def _answer(self) -> None:
        """There is something besides reasoning."""
        if not self._answered:
            self._answered, self._thought = True, []

    def _take_marker(self, marker: str) -> None:
        if marker == "</think>" and self._reasoning and self._state in _NO_CALL_YET:
            # What the thinking part only spoke of must not keep it from ending: the answer comes behind it.
            if self._state in (_State.NAME, _State.JSON):
                self._give_up_call()
            self._state = _State.PROSE
            self._part(reasoning=False)
        elif self._state in _IS_PROSE:
            self._marker_in_prose(marker)
        elif self._state is _State.NAME:
            self._marker_in_name(marker)
        elif self._state is _State.JSON:
            self._raw.append(marker)
            if marker == "</tool_call>":
                self._end_name()
        else:
            self._marker_in_call(marker)

    def _marker_in_prose(self, marker: str) -> None:
        state, inside = self._state, self._state is _State.VERBATIM_VALUE
        if marker in _THINK and not inside:
            self._state = _State.PROSE
            self._part(reasoning=marker == "<think>")
        elif marker == "<tool_call>" and self._calls and not inside:
            self._state = _State.NAME
            self._raw, self._name, self._name_ended = [marker], "", False
        elif state is not _State.PROSE or not self._calls:
            self._prose(marker)
            if state is not _State.PROSE:
                self._state = _VERBATIM_NEXT.get(marker, state)
        else:  # a stray one
            self._part(reasoning=self._reasoning)

    def _part(self, *, reasoning: bool) -> None:
        """A part of the prose ends, and another begins."""
        if reasoning != self._reasoning:
            self._thought = []
        self._reasoning, self._space, self._edge = reasoning, [], True

    def _take_name(self, text: str) -> None:
        """More of a name. As soon as it can be none that is declared, it is prose."""
        self._raw.append(text)
        body = text.strip()
        if not body:
            self._name_ended = self._name_ended or bool(self._name)
            return
        if not self._name and body[0] == "{":
            self._state = _State.JSON
            return
        ended = self._name_ended or bool(self._name and text[0].isspace())
        self._name += body
        self._name_ended = text[-1].isspace()
        place = bisect_left(self._names, self._name)
        if ended or place == len(self._names) or not self._names[place].startswith(self._name):
            self._give_up_call()

    def _marker_in_name(self, marker: str) -> None:
        if marker not in _AFTER_NAME:  # a stray one
            self._raw.append(marker)
        elif marker == "</tool_call>":
            if self._name in self._tools:
                self._end_name()
            else:
                self._give_up_call()
                self._take_marker(marker)
        elif self._name in self._tools:
            self._start_call(self._name)
            self._take_marker(marker)
        else:
            self._give_up_call()
            self._take_marker(marker)

    def _give_up_call(self) -> None:
        """What was taken for a call is prose."""
        raw, self._raw, self._state = "".join(self._raw), [], _State.VERBATIM
        self._prose(raw)

    def _end_name(self) -> None:
        """The call ends with its name, or with the object that it is written as."""
        if self._state is _State.NAME and self._name in self._tools:
            self._start_call(self._name, "{}")
            self._leave_call()
            return
        found = self._json_call() if self._state is _State.JSON else None
        if found is None:
            self._give_up_call()
            self._state = _State.PROSE
        else:
            self._start_call(*found)
            self._leave_call()

    def _json_call(self) -> tuple[str, str] | None:
        """Name and arguments of a call that is written as an object; None if it is no call of a declared function."""
        text = "".join(self._raw).removeprefix("<tool_call>").removesuffix("</tool_call>")
        try:
            call = read_json(text)
            arguments = call.get("arguments")
            arguments = read_json(arguments) if isinstance(arguments, str) else arguments
            name = call.get("name")
            if isinstance(name, str) and name in self._tools and isinstance(arguments, dict | None):
                return name, object_to_json(arguments or {})
        except (ValueError, RecursionError):
            pass
        return None

    def _start_call(self, name: str, arguments: str = "{") -> None:
        self._part(reasoning=False)
        self._answer()
        self._raw, self._keys, self._state = [], set(), _State.BETWEEN
        self._types = ArgumentTypes(self._tools[name].parameters)
        self._events.append(CallStart(self.num_calls, f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1
        self._arguments(arguments)

    def _arguments(self, text: str) -> None:
        self._events.append(CallArguments(self.num_calls - 1, text))

    def _marker_in_call(self, marker: str) -> None:
        state = self._state
        if marker == "</tool_call>":
            self._end_call()
        elif state is _State.VALUE or state is _State.SKIPPED_VALUE:
            if marker == "</arg_value>":
                self._end_value()
            else:
                self._take_text(marker)
        elif marker == "<tool_call>":
            self._end_call()
            self._marker_in_prose(marker)
        elif marker == "<arg_key>":
            self._state, self._pieces = _State.KEY, []
        elif marker == "</arg_key>" and state is _State.KEY:
            self._state = _State.AFTER_KEY
        elif marker == "<arg_value>":
            self._start_value("".join(self._pieces).strip() if state is not _State.BETWEEN else "")

    def _start_value(self, key: str) -> None:
        self._pieces = []
        if not key or key in self._keys:
            self._state = _State.SKIPPED_VALUE
            return
        self._state = _State.VALUE
        self._value_types = self._types.of(key)
        if self._value_types == STRING:
            self._value_types = STRING
        before = f"{', ' if self._keys else ''}{quoted(key)}: "
        self._keys.add(key)
        self._arguments(before + '"' if self._value_types is STRING else before)

    def _end_value(self) -> None:
        if self._state is _State.VALUE:
            text, self._pieces = "".join(self._pieces), []
            self._arguments('"' if self._value_types is STRING else to_json(text, self._value_types))
        self._state = _State.BETWEEN

    def _end_call(self) -> None:
        self._end_value()
        self._arguments("}")
        self._leave_call()

    def _leave_call(self) -> None:
        self._events.append(CallEnd(self.num_calls - 1))
        self._state, self._pieces = _State.PROSE, []
        self._part(reasoning=False)


_THINK = frozenset({"<think>", "</think>"})
_AFTER_NAME = frozenset({"<arg_key>", "<arg_value>", "<tool_call>", "</tool_call>"})
"""What ends a name. Others are stray there."""
_IS_PROSE = frozenset({_State.PROSE, _State.VERBATIM, _State.VERBATIM_VALUE})
_NO_CALL_YET = _IS_PROSE | {_State.NAME, _State.JSON}
_IN_CALL = frozenset({_State.KEY, _State.AFTER_KEY, _State.VALUE, _State.SKIPPED_VALUE, _State.BETWEEN})
_VERBATIM_NEXT = {
    "<arg_value>": _State.VERBATIM_VALUE,
    "</arg_value>": _State.VERBATIM,
    "</tool_call>": _State.PROSE,
}
