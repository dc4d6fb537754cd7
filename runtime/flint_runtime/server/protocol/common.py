"""Fields that requests of several APIs share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Lock
from typing import Any

from pydantic import BaseModel, ConfigDict

from flint_runtime.errors import UsageError, shown
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

_MOST_NAMES = 1000
"""That are remembered as logged."""
_logged: set[str] = set()
_lock = Lock()


def log_once(name: str, message: str) -> None:
    """Log a message about a name, which stands at its %s, unless there was one about it before."""
    with _lock:
        new = name not in _logged and len(_logged) < _MOST_NAMES
        if new:
            _logged.add(name)
    if new:
        logger.warning(message, shown(name))


class RequestModel(BaseModel):
    """A body. Fields that nobody knows are accepted, and logged once by name: clients send what other servers have."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), arbitrary_types_allowed=True)

    def log_unknown_fields(self) -> None:
        """Log the names of unknown fields that were not logged before."""
        for name in self.model_extra or ():
            log_once(name, "Requests have a field that this server does not know and ignores: %s")


class StreamOptions(RequestModel):
    """What a stream says besides its text."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class SamplingFields(RequestModel):
    """SamplingParams by vLLM's names, and what is never served here: named, so that it is refused and not dropped."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    prompt_embeds: Any = None
    lora_request: Any = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.includes_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def refuse_unserved(self) -> None:
        """Raise UsageError for what would change an answer and is not there."""
        if self.use_beam_search:
            raise UsageError("use_beam_search must be left out: there is no beam search here.")
        if self.best_of not in (None, self.n or 1):
            raise UsageError(f"best_of must be left out: all n answers are returned; found {self.best_of}.")
        if self.prompt_embeds is not None:
            raise UsageError("prompt_embeds must be left out: a prompt is text or token ids here.")
        if self.lora_request is not None:
            raise UsageError("lora_request must be left out: there are no LoRA adapters here.")


_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "seed", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs", "logprob_token_ids",
    "thinking_token_budget", "priority", "cache_salt",
)  # fmt: skip


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputsParams | None,
    **changed: Any,
) -> SamplingParams:
    """The parameters of a request. Raises UsageError.

    Args:
        changed: values that go before the body's.
    """
    values = {name: getattr(fields, name) for name in _SAME_NAME}
    kind = RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams.from_optional(
        **{**values, **changed},
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured,
        output_kind=kind,
    )


def structured_outputs(fields: SamplingFields) -> StructuredOutputsParams | None:
    """What `response_format` or `structured_outputs` ask for; None for free text. Raises UsageError."""
    given, wanted = fields.structured_outputs, _response_format(fields.response_format)
    if given is None:
        return wanted
    if wanted is not None:
        raise UsageError("structured_outputs must be left out beside response_format: an answer has one form.")
    known = [name for name in StructuredOutputsParams.__dataclass_fields__ if name != "calls"]  # made from tools
    values = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UsageError(f"structured_outputs must have only {', '.join(known)}; found {shown(unknown[0])}.")
    return StructuredOutputsParams(**values)


def _response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise UsageError(f"response_format.json_schema.schema must be a JSON schema, found {shown(schema)}.")
        if isinstance(schema, bool):
            return StructuredOutputsParams(json="true" if schema else "false")
        return StructuredOutputsParams(json=schema)
    raise UsageError(f"response_format.type must be text, json_object or json_schema; found {shown(kind)}.")
