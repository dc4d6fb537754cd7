"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from flint_runtime.server.protocol.common import SamplingFields


class ChatRequest(SamplingFields):
    """OpenAI's fields and vLLM's. Messages and tools are checked by `flint_runtime.chat`."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: Any = None
    """OpenAI's form before tools, which nobody sends any more."""
    function_call: Any = None
