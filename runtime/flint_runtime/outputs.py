"""What a request returns. Names and meanings are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from flint_runtime.request import FinishReason


@dataclass(slots=True)
class Logprob:
    """Of one token at one place, in the model's own distribution."""

    logprob: float
    rank: int | None
    """1 is the likeliest. None of a token of the prompt, or one of logprob_token_ids, below the 20 likeliest."""
    decoded_token: str | None
    """Its bytes as a text, U+FFFD for what is no character; None without detokenize."""
    token_bytes: bytes = b""
    """What the token stands for: a character may be spread over several."""


Logprobs = dict[int, Logprob]
"""By token id: the token at that place, and the likeliest ones as many as were asked for, or those asked for."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers; with output kind DELTA, what is new of it (cumulative_logprob stays of all)."""

    index: int
    text: str
    token_ids: list[int]
    """With the token that ended it, and with those that spell a stop text."""
    cumulative_logprob: float
    logprobs: list[Logprobs] | None = None
    """One entry per token of token_ids, if asked for."""
    finish_reason: FinishReason | None = None
    """None while it runs."""
    stop_reason: int | str | None = None
    """The stop token or stop text that ended it; None at an end-of-sequence token."""
    error: str | None = None
    """With finish_reason "error": what is wrong."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Of each token among Tokenizer.markers: the offset of its first character in the answer's whole text, and its id.
    With DELTA too the offset counts from the answer's start, and may lie ahead of the text that has come so far. One
    that a stop text cut off lies, or ends, beyond the whole text."""

    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of time.monotonic(); None: not yet."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None


@dataclass(slots=True)
class RequestOutput:
    """A request's answers so far. With output kind DELTA, `outputs` has only those with something new."""

    request_id: str
    prompt: str | None
    """None where the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    """Whether all answers are."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One entry per prompt token, if asked for; the first is None. With DELTA, only in the first output."""
    num_cached_tokens: int = 0
    """Prompt tokens that prefix caching saved."""
    metrics: RequestMetrics | None = None
