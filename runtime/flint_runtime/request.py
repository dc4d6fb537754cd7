"""What the engine core is asked and what it answers: token ids only, no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flint_runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a generation ended: a stop token, max_tokens, an abort, a fault of this request."""


class Grammar(Protocol):
    """What a request's output must match, as far as it has come. Used by one request."""

    @property
    def triggers(self) -> frozenset[int] | None:
        """In a free part, where no token but these changes what is allowed: the core may draw one token ahead there.

        None where every token changes it: each must be accepted before the next one is drawn.
        """

    def mask(self, ahead: int = 0) -> npt.NDArray[np.int32] | None:
        """The tokens allowed next, [V / 32]: bit v % 32 of word v / 32; none: the request ends with an error.

        None for every token. Waits for what follows from the token accepted last.

        Args:
            ahead: tokens drawn and not accepted yet, none of them a trigger; above 0 only in a free part. There an
                array is never changed: as long as it is the same one, so is what it allows.
        """

    def accept(self, token_id: int) -> bool:
        """Begin to advance by a drawn token. False: it was not allowed (a bug)."""

    def wait(self, seconds: float) -> bool:
        """Wait so long at most until it is known what follows from the token accepted last; whether it is."""

    @property
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may follow; false until it is known."""

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on."""


@dataclass
class EngineRequest:
    """One generation, to be run once. The core changes nothing of it but `scheduled` and the grammar's state."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    """After `with_defaults`."""
    max_tokens: int
    """Most tokens to generate; prompt and answer fit the context."""
    stop_token_ids: frozenset[int]
    """Tokens that end the generation: the request's own, and the end-of-sequence ids unless ignore_eos."""
    eos_token_ids: frozenset[int]
    """End-of-sequence ids: not drawn before min_tokens, ignore_eos or not."""
    grammar: Grammar | None = None
    arrival: float = 0.0
    """time.monotonic() at which it came."""
    scheduled: float | None = None
    """time.monotonic() at which its first step was submitted."""
    started: bool = False
    """Whether an engine has taken it."""


class TokenOutput(NamedTuple):  # of all tuples the quickest to make: there is one per token
    """A token with its logprob, and the likeliest tokens at its place, best first; as many as were asked for.

    With logprob_token_ids, those tokens stand in place of the likeliest.
    """

    token_id: int
    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None
    """Of the token among all, 1 for the likeliest; None where nobody asked, or it is not known."""
    top_ranks: tuple[int | None, ...] = ()
    """Of top_tokens, None below the 20 likeliest; empty: 1, 2, …."""


class CoreOutput(NamedTuple):
    """What a step brought a request."""

    request_id: str
    tokens: tuple[TokenOutput, ...]
    """New ones: usually one, several with speculation, none where a request ends without."""
    finish_reason: FinishReason | None = None
    """Set on a request's last output."""
    error: str | None = None
    """With finish_reason "error": what is wrong."""
    prompt_logprobs: tuple[TokenOutput | None, ...] | None = None
    """Of every prompt token, if asked for; once, with the first token. The first entry is None."""
    cached_tokens: int = 0
    """Prompt tokens that prefix caching saved."""
