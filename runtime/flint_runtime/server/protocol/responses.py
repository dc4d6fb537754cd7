"""The body of /v1/responses."""

from __future__ import annotations

from typing import Any

from flint_runtime.errors import UsageError
from flint_runtime.server.protocol.common import RequestModel, SamplingFields


class TextOptions(RequestModel):
    """The form of an answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(RequestModel):
    """Whether to think."""

    effort: str | None = None
    summary: str | None = None
    """There are none: the reasoning itself is returned."""


class ResponsesRequest(SamplingFields):
    """OpenAI's fields and vLLM's. Items and tools are checked by `flint_runtime.server.responses_input`."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response can be asked for later."""
        return self.store is not False

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning comes with a text that brings it back, for clients that keep no other."""
        return "reasoning.encrypted_content" in (self.include or ())

    def refuse_unserved(self) -> None:
        """Raise UsageError for what would change an answer and is not there."""
        super().refuse_unserved()
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise UsageError(f"max_output_tokens must be 1 or more, found {self.max_output_tokens}.")
        if self.background:
            raise UsageError("background must be false or left out: a response is answered while its client waits.")
        if self.conversation is not None:
            raise UsageError("conversation must be left out: use previous_response_id.")
        if self.prompt is not None:
            raise UsageError("prompt must be left out: no prompts are kept here. Use input and instructions.")
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            raise UsageError("top_logprobs must be left out: /v1/chat/completions has logprobs.")
        if self.n not in (None, 1):
            raise UsageError(f"n must be 1: a response is one answer; found {self.n}.")
        if self.truncation not in (None, "auto", "disabled"):
            raise UsageError(f"truncation must be auto or disabled, found {self.truncation!r}.")
