"""Generation of one sequence at a time over any executor: chunked prefill, then one token per decode step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.errors import FlintError, UsageError
from flint_runtime.executors.base import NO_TOKEN, Executor
from flint_runtime.executors.step import RowSampling, SequencePart, build_step
from flint_runtime.manifest import Phase
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]

_SLOT = 0
"""Ring and sampling slot of the only sequence."""


class NonFiniteLogitsError(FlintError):
    """The model returned NaN or infinity: damaged weights, or a bug of ours."""


@dataclass(frozen=True)
class GeneratedToken:
    """One token of a generation. `text` is what it completes: empty for special tokens and inside a character.

    finish_reason is set on the last token only: "stop" at an end-of-sequence or stop token, else "length".
    """

    token_id: int
    logprob: float
    text: str
    finish_reason: FinishReason | None


class Generator:
    """Generates over an executor that it has for itself."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer) -> None:
        self._executor = executor
        self._tokenizer = tokenizer

    def token_budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens may be generated: max_tokens, or what the context leaves.

        Raises:
            UsageError: the prompt is empty, or prompt and max_tokens exceed the engine's context.
        """
        context = self._executor.limits.max_context
        if not prompt_tokens:
            raise UsageError("The prompt is empty; a generation needs at least one token to start from.")
        if prompt_tokens >= context:
            raise UsageError(
                f"The prompt has {prompt_tokens} tokens; this engine's context is {context} tokens, and at least one "
                "must be left for the answer. Shorten the prompt, or build the engine with a larger --max-context."
            )
        if max_tokens is None:
            return context - prompt_tokens
        if prompt_tokens + max_tokens > context:
            raise UsageError(
                f"The prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together more than this "
                f"engine's context of {context} tokens. Lower max_tokens to {context - prompt_tokens}, or shorten the "
                "prompt."
            )
        return max_tokens

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[GeneratedToken]:
        """Check a request, then generate token by token.

        Args:
            prompt: a text, or token ids.
            params: what is None in them takes the checkpoint's defaults.
        Raises:
            UsageError: at once, where the request cannot be served.
            NonFiniteLogitsError: while iterating.
        """
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocabulary = self._executor.config.vocab_size
        if any(not 0 <= token < vocabulary for token in token_ids):
            raise UsageError(f"The prompt has token ids outside the vocabulary of {vocabulary}.")
        params = (params or SamplingParams()).with_defaults(self._tokenizer.defaults)
        budget = self.token_budget(len(token_ids), params.max_tokens)
        return self._run(token_ids, params, budget)

    def _run(self, prompt: list[int], params: SamplingParams, budget: int) -> Iterator[GeneratedToken]:
        executor, stream = self._executor, self._tokenizer.stream()
        stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._tokenizer.eos_token_ids))
        # The last token is never fed back, so it needs no place.
        pages = -(-(len(prompt) + budget - 1) // PAGE_TOKENS)
        if executor.pools.pages < pages or not executor.pools.slots or not executor.pools.sample_slots:
            executor.allocate(pages, slots=1, sample_slots=1)
        executor.begin_sequence(_SLOT, prompt)
        first, chunk = 0, executor.limits.prefill_chunk
        while len(prompt) - first > chunk:
            # Every step has a row of logits: here a greedy draw that is neither counted nor used.
            self._step("prefill", prompt[first : first + chunk], first, RowSampling())
            first += chunk
        token, logprob = self._step("prefill", prompt[first:], first, params.row(0, _SLOT))
        for count in range(1, budget + 1):
            if token == NO_TOKEN:
                raise NonFiniteLogitsError(
                    f"The model's logits for token {len(prompt) + count - 1} are not finite. Check the engine with: "
                    "run-engine verify"
                )
            reason: FinishReason | None = "stop" if token in stop else "length" if count == budget else None
            text = stream.add([token]) + (stream.finish() if reason else "")
            yield GeneratedToken(token, logprob, text, reason)
            if reason:
                return
            token, logprob = self._step("decode", [token], len(prompt) + count - 1, params.row(count, _SLOT))

    def _step(self, phase: Phase, token_ids: Sequence[int], start: int, draw: RowSampling) -> tuple[int, float]:
        """Run the next tokens; the token drawn behind the last, and its logprob."""
        pages = range(-(-(start + len(token_ids)) // PAGE_TOKENS))
        part = SequencePart(token_ids, start, pages, ring_slot=_SLOT, rows=[(-1, draw)])
        result = self._executor.run(phase, build_step([part]))
        return int(result.tokens[0]), float(result.logprobs[0])
