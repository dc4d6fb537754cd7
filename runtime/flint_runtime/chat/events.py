"""What an answer consists of, in the order in which it comes. A text may come in any number of events."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningText(NamedTuple):
    """More of the reasoning."""

    text: str


class ContentText(NamedTuple):
    """More of the content."""

    text: str


class CallStart(NamedTuple):
    """A call of a declared function; its name is complete."""

    index: int
    """Of the call in the answer, from 0 on, without gaps."""
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: the texts concatenate to a JSON object, or its beginning where no CallEnd comes."""

    index: int
    text: str


class CallEnd(NamedTuple):
    """The call is complete. A call that was cut off never gets one."""

    index: int


Event = ReasoningText | ContentText | CallStart | CallArguments | CallEnd
