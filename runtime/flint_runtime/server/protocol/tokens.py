"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from flint_runtime.server.protocol.chat import ChatRequest
from flint_runtime.server.protocol.common import RequestModel


class TokenizeRequest(ChatRequest):
    """A prompt, or a conversation as /v1/chat/completions takes it."""

    messages: list[Any] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
