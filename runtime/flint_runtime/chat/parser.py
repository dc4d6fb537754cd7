"""GlmParser: thinking, content and tool calls in what a GLM-4.5 or GLM-4.7 style model writes.

One state machine for streamed answers and whole ones: how the text is cut into pieces changes nothing but how the
events are cut. What is sent cannot be taken back, so the first reading of a doubtful passage stays.

A marker is a token, told by `marks`; the same characters spelled by ordinary tokens are text. Decisions where the
output is not as the template has it:

- An undeclared name, a call that is no call, and any call where none may be made: content, verbatim; in the thinking
  part, more of that. A call of a declared tool ends the thinking part.
- White space beside a marker is dropped, in content and around the thinking part; never in a value.
- The model ended a call without its last markers: they are taken as written. It was cut off, by a limit or a stop text:
  the call stays unfinished, for a command that is cut in the middle but parses is worse than one that does not parse.
- The thinking part never ended, but the answer did: then the answer is in it. It was sent as reasoning, so it is sent
  once more as content.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Any

from flint_runtime.chat.argument_values import ArgumentTypes, string_json, value_json
from flint_runtime.chat.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from flint_runtime.chat.tools import FunctionTool
from flint_runtime.tokenizer import Tokenizer

FORMATS = ("glm45", "glm47")
"""Names of this format, as vLLM's flags have them."""

_SPACE = " \t\r\n"


class _State(IntEnum):  # its hash is quick, and there is one look-up per token
    REASONING = auto()
    CONTENT = auto()
    NAME = auto()
    """Behind <tool_call>: it is not known yet whether this is a call."""
    VERBATIM = auto()
    """In what looks like a call and is none."""
    PAIRS = auto()
    """In a call, behind its name or a value."""
    KEY = auto()
    VALUE = auto()


class GlmParser:
    """Reads one answer.

    Attributes:
        reasoning_tokens: tokens of the thinking part so far, without markers and end tokens.
        num_calls: calls so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Mapping[str, FunctionTool], *, thinking: bool, calls: bool = True
    ) -> None:
        """
        Args:
            tools: by name; only their calls are calls.
            thinking: the prompt leaves the thinking part open (`Tokenizer.opens_thinking`).
            calls: calls may be made.
        """
        self._markers = tokenizer.markers
        self._uncounted = self._markers.keys() | set(tokenizer.eos_token_ids)
        self._tools = tools
        self._calls = calls and bool(tools)
        self.reasoning_tokens = self.num_calls = 0
        self._counting = thinking
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._reasoning, self._content = _Trimmed(), _Trimmed()
        self._thoughts: list[str] = []
        self._answered = False
        """Whether there is content or a call."""
        self._events: list[Event] = []
        # What has arrived of the text, and the markers in it.
        self._marks: deque[tuple[int, int]] = deque()
        self._position = 0
        self._rest = ""
        # Of the call at hand.
        self._raw: list[str] = []
        """The call as written, while it may be none."""
        self._written: list[str] = []
        """The name, key or value so far, if it is not sent piece by piece."""
        self._in_reasoning = False
        """Whether the call at hand begins in the thinking part."""
        self._arguments = _Arguments({})
        self._text: dict[_State, Callable[[str], None]] = {
            _State.REASONING: self._add_reasoning,
            _State.CONTENT: self._add_content,
            _State.NAME: self._add_name,
            _State.VERBATIM: self._add_verbatim,
            _State.PAIRS: lambda text: None,
            _State.KEY: self._written_add,
            _State.VALUE: self._add_value,
        }

    def feed(self, text: str, token_ids: Sequence[int], marks: Sequence[tuple[int, int]]) -> list[Event]:
        """Read what is new of the answer.

        Args:
            text, token_ids: of a CompletionOutput.
            marks: its marks: offset in the answer's whole text, and token id, of each marker.
        Returns:
            what it shows to have come.
        """
        if self._counting or marks:
            self._count(token_ids)
        if marks or self._marks:
            self._marks.extend(marks)
            self._split(text)
        elif text:
            self._position += len(text)
            self._text[self._state](text)
        return self._take()

    def finish(self, finish_reason: str, stop_reason: int | str | None = None) -> list[Event]:
        """No more comes.

        Args:
            finish_reason, stop_reason: of the last CompletionOutput. "stop" without a reason: the model ended it.
        """
        if self._rest:  # A stop text has taken the end of a marker.
            self._text[self._state](self._rest)
            self._rest = ""
        ended = finish_reason == "stop" and stop_reason is None
        if self._state in (_State.NAME, _State.PAIRS, _State.KEY, _State.VALUE):
            if ended:
                self._end_call()
            elif self._state is _State.NAME:
                self._no_call()
        self._send_content(self._content.rest())
        if self._state is _State.REASONING and ended and not self._answered:
            self._send_content("".join(self._thoughts))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _count(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the thinking part; they may be ahead of the text."""
        for token in token_ids:
            if token not in self._uncounted:
                self.reasoning_tokens += self._counting
            elif (marker := self._markers.get(token)) is not None:
                if marker == "<think>":
                    self._counting = True
                elif marker == "</think>" or (marker == "<tool_call>" and self._calls):
                    self._counting = False

    def _split(self, text: str) -> None:
        """Read text with markers in it; one of which not all has come waits."""
        text, self._rest = self._rest + text, ""
        while self._marks:
            offset, token = self._marks[0]
            marker = self._markers[token]
            begin = offset - self._position
            if begin >= len(text):
                break
            if begin > 0:
                self._text[self._state](text[:begin])
                text, self._position = text[begin:], offset
            if len(text) < len(marker):
                self._rest = text
                return
            self._marks.popleft()
            text, self._position = text[len(marker) :], offset + len(marker)
            self._mark(marker)
        if text:
            self._position += len(text)
            self._text[self._state](text)

    # --- Markers ------------------------------------------------------------------------------------------------------

    def _mark(self, marker: str) -> None:
        state = self._state
        if state is _State.REASONING:
            self._mark_reasoning(marker)
        elif state is _State.CONTENT:
            self._mark_content(marker)
        elif state is _State.NAME:
            self._mark_name(marker)
        elif state is _State.VERBATIM:
            self._mark_verbatim(marker)
        elif state is _State.VALUE and marker not in ("</arg_value>", "<arg_key>", "</tool_call>"):
            self._add_value(marker)
        else:
            self._mark_pairs(marker)

    def _mark_reasoning(self, marker: str) -> None:
        if marker == "</think>":
            self._end_reasoning()
            self._state = _State.CONTENT
        elif marker == "<tool_call>" and self._calls:
            self._begin_name()
        elif marker != "<think>":
            self._add_reasoning(marker)

    def _mark_content(self, marker: str) -> None:
        if marker == "<think>":
            self._content.drop()
            self._state = _State.REASONING
        elif marker == "</think>":
            self._content.drop()
        elif not self._calls:
            self._add_content(marker)
        elif marker == "<tool_call>":
            self._begin_name()
        elif marker == "</tool_call>":
            self._content.drop()

    def _begin_name(self) -> None:
        self._in_reasoning = self._state is _State.REASONING
        self._state = _State.NAME
        self._raw, self._written = ["<tool_call>"], []

    def _mark_name(self, marker: str) -> None:
        name = "".join(self._written).strip()
        if marker == "<tool_call>":
            self._end_call()
            self._begin_name()
        elif marker == "</tool_call>":
            self._raw.append(marker)
            self._end_call()
        elif name in self._tools:
            self._start_call(name)
            self._mark_pairs(marker)
        else:
            is_none = bool(name) and not name.startswith("{")
            if self._in_reasoning and (is_none or marker == "</think>"):
                self._no_call()
                self._mark(marker)
                return
            self._raw.append(marker)
            if is_none:
                self._no_call()
            elif name:
                self._written.append(marker)

    def _mark_verbatim(self, marker: str) -> None:
        if marker == "<tool_call>":
            self._begin_name()
            return
        self._send_content(marker)
        if marker == "</tool_call>":
            self._state = _State.CONTENT
            self._content = _Trimmed(begun=True)

    def _mark_pairs(self, marker: str) -> None:
        """A marker in a call whose name is known."""
        arguments = self._arguments
        if marker == "</tool_call>":
            self._end_call()
        elif marker == "<tool_call>":
            self._end_call()
            self._begin_name()
        elif marker == "<arg_key>":
            self._end_value()
            self._send_arguments(arguments.begin())
            self._state, self._written = _State.KEY, []
        elif marker == "</arg_key>":
            if self._state is _State.KEY:
                arguments.key = "".join(self._written).strip()
                self._state = _State.PAIRS
        elif marker == "<arg_value>":
            if self._state is _State.KEY:
                arguments.key = "".join(self._written).strip()
            self._state, self._written = _State.VALUE, []
            self._send_arguments(arguments.begin_value())
        elif marker == "</arg_value>" and self._state is _State.VALUE:
            self._end_value()
            self._state = _State.PAIRS

    # --- Text ---------------------------------------------------------------------------------------------------------

    def _add_reasoning(self, text: str) -> None:
        text = self._reasoning.add(text)
        if text:
            self._events.append(ReasoningText(text))
            self._thoughts.append(text)

    def _end_reasoning(self) -> None:
        self._reasoning.drop()
        self._answered = True  # What comes is the answer, even if nothing does.

    def _add_content(self, text: str) -> None:
        self._send_content(self._content.add(text))

    def _send_content(self, text: str) -> None:
        if text:
            self._answered = True
            self._events.append(ContentText(text))

    def _written_add(self, text: str) -> None:
        self._written.append(text)

    def _add_name(self, text: str) -> None:
        self._raw.append(text)
        self._written.append(text)

    def _add_verbatim(self, text: str) -> None:
        self._send_content(text)

    def _add_value(self, text: str) -> None:
        if self._arguments.streams:
            self._send_arguments(string_json(text))
        elif self._arguments.key:
            self._written.append(text)

    # --- Calls --------------------------------------------------------------------------------------------------------

    def _no_call(self) -> None:
        """What began as a call is none: it is content, with the white space before it, or more of the thinking part."""
        if self._in_reasoning:
            self._add_reasoning("".join(self._raw))
            self._state = _State.REASONING
            return
        self._send_content(self._content.rest())
        self._send_content("".join(self._raw))
        self._state = _State.VERBATIM

    def _start_call(self, name: str) -> None:
        if self._in_reasoning:
            self._end_reasoning()
        self._content.drop()
        self._answered = True
        self._arguments = _Arguments(self._tools[name].parameters)
        self._events.append(CallStart(self.num_calls, f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1
        self._state = _State.PAIRS

    def _end_call(self) -> None:
        """The model ended a call, or what began as one."""
        if self._state is _State.NAME:
            name = "".join(self._written).strip()
            if name in self._tools:
                self._start_call(name)
            elif not self._json_call(name):
                self._no_call()
                if self._state is _State.VERBATIM:
                    self._state, self._content = _State.CONTENT, _Trimmed(begun=True)
                return
        self._end_value()
        self._send_arguments(self._arguments.end())
        self._events.append(CallEnd(self.num_calls - 1))
        self._state = _State.CONTENT
        self._content = _Trimmed()

    def _json_call(self, text: str) -> bool:
        """Start a call that is written as a JSON object with name and arguments; whether it is one."""
        try:
            found: Any = json.loads(text)
            arguments = found.get("arguments", {}) if isinstance(found, dict) else None
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(arguments, dict) or found.get("name") not in self._tools:
                return False
            written = json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return False
        self._start_call(found["name"])
        self._arguments.whole = written
        return True

    def _end_value(self) -> None:
        if self._state is _State.VALUE:
            self._send_arguments(self._arguments.end_value("".join(self._written)))

    def _send_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))


class _Trimmed:
    """A text without white space at its ends, piece by piece: what may stand at the end is held back."""

    def __init__(self, begun: bool = False) -> None:
        self._begun = begun
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """What may be sent now."""
        kept = text.rstrip(_SPACE)
        if not kept:
            if self._begun:
                self._held.append(text)
            return ""
        if not self._begun:
            self._begun = True
            rest, kept = text[len(kept) :], kept.lstrip(_SPACE)
        else:
            rest = text[len(kept) :]
        if self._held:
            kept = "".join(self._held) + kept
            self._held = []
        if rest:
            self._held.append(rest)
        return kept

    def drop(self) -> None:
        """A marker follows: no white space before it, none behind it."""
        self._begun, self._held = False, []

    def rest(self) -> str:
        """What was held back, where no marker follows."""
        held, self._held = "".join(self._held), []
        return held


class _Arguments:
    """The JSON object of a call's arguments. Its methods return what is new of it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._types = ArgumentTypes(schema)
        self._keys: set[str] = set()
        self._opened = False
        self.key = ""
        """Of the value that comes next; empty: of none, and the value is dropped."""
        self.streams = False
        """Whether the value at hand is a string that is sent as it comes."""
        self.whole = ""
        """The object, where it came as JSON."""

    def begin(self) -> str:
        """A key begins."""
        self.key, self.streams = "", False
        opened, self._opened = self._opened, True
        return "" if opened else "{"

    def begin_value(self) -> str:
        """A value begins. The first one of a key counts: it is already sent."""
        if not self.key or self.key in self._keys:
            self.key = ""
            return ""
        comma = ", " if self._keys else "" if self._opened else "{"
        self._opened = True
        self._keys.add(self.key)
        self.streams = self._types.of(self.key) == {"string"}
        return f'{comma}"{string_json(self.key)}": ' + ('"' if self.streams else "")

    def end_value(self, text: str) -> str:
        """A value is complete; `text` is what was not sent of it."""
        streams, key = self.streams, self.key
        self.streams, self.key = False, ""
        if streams:
            return '"'
        return value_json(text, self._types.of(key)) if key else ""

    def end(self) -> str:
        """The call is complete."""
        return self.whole or ("}" if self._opened else "{}")
