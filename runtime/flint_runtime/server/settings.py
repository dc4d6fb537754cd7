"""What `run-engine serve` was told, as far as answers depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flint_runtime.errors import UsageError

DEFAULT_MAX_BODY_MB = 16


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server; `run-engine serve --help` explains them.

    Raises:
        UsageError: one is out of its range.
    """

    model_names: tuple[str, ...]
    """Names of the one model; the first is the one that answers carry."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the server; none: it is open."""
    chat_template: str | None = None
    """The text of a template that replaces the checkpoint's."""
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    max_queue: int | None = None
    """Answers that may wait beyond those that can run at once; None for no limit."""
    max_queued_tokens: int | None = None
    """Prompt tokens of all waiting requests; None for no limit. A request alone may have more."""
    max_body_bytes: int = DEFAULT_MAX_BODY_MB << 20
    stuck_seconds: float = 120.0
    """A step that takes longer is taken for an engine that hangs."""
    idle_seconds: float = 15.0
    """A stream that is silent so long gets a comment, so that nobody between takes it for dead."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Web pages that a browser lets call this server."""
    root_path: str = ""

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise UsageError("served-model-name must not be empty.")
        if not all(self.api_keys):
            raise UsageError("api-key must not be empty. Leave it out for a server that everybody may use.")
        for name, value in (("max-queue", self.max_queue), ("max-queued-tokens", self.max_queued_tokens)):
            if value is not None and value < 0:
                raise UsageError(f"{name} must be 0 or more, found {value}.")
        if self.max_body_bytes <= 0:
            raise UsageError("max-body-mb must be above 0.")
