"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from flint_runtime.server.protocol.common import SamplingFields


class CompletionRequest(SamplingFields):
    """OpenAI's fields and vLLM's."""

    prompt: Any
    """A text, texts, token ids, or lists of them."""
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
