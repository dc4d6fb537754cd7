"""What an answer consists of, in the order in which it comes. A text may come in any number of events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(slots=True)
class ContentText:
    """More of the content."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A call of a declared function; its name is complete."""

    index: int
    """Of the call in the answer, from 0 on, without gaps."""
    call_id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of a call's arguments: the texts concatenate to a JSON object, or its beginning where no CallEnd comes."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """The call is complete. A call that was cut off never gets one."""

    index: int


Event = ReasoningText | ContentText | CallStart | CallArguments | CallEnd
