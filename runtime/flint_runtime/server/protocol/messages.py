"""The bodies of /v1/messages and /v1/messages/count_tokens, by Anthropic's names."""

from __future__ import annotations

from typing import Any

from flint_runtime.server.protocol.common import RequestModel


class CountTokensRequest(RequestModel):
    """What a prompt is made of. Contents and tools are checked by `flint_runtime.server.messages_input`."""

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """The form of the answer, as it was called before `output_config.format`."""


class MessagesRequest(CountTokensRequest):
    """A prompt, and how to answer it."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    """Says who asks; changes no answer."""
