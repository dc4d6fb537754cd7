"""A request as the scheduler and the engine core see it while it lives."""

from __future__ import annotations

from enum import Enum

from flint_runtime.kv_cache import BlockTable
from flint_runtime.prompt_lookup import PromptLookup
from flint_runtime.request import EngineRequest, TokenOutput
from flint_runtime.token_logprobs import needs_logits


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It has lost its place, but a step in flight still uses it; then it waits."""
    FINISHED = "finished"
    """It ended or was aborted; it goes with the last step in flight that uses its place."""


class Sequence:
    """One request's tokens and how far they have come.

    `num_tokens` tokens exist, of which `tokens` are known here and one may be drawn but not read yet; K and V of
    `num_computed` of them are computed, once the submitted steps have run. More than one left to compute: a prompt (or,
    after a preemption, all tokens so far) in prefill. Exactly one: the token that the next decode step takes.
    """

    __slots__ = (
        "admitted",
        "banning",
        "biased",
        "boundaries",
        "cached_tokens",
        "constrained",
        "draw_head",
        "has_penalties",
        "in_flight",
        "kept_boundary",
        "logprob_token_ids",
        "lookup",
        "mask",
        "max_length",
        "needs_logits",
        "next_boundary",
        "num_computed",
        "num_prompt",
        "num_tokens",
        "num_top",
        "num_written",
        "number",
        "order",
        "parsing",
        "prompt_logprobs",
        "request",
        "status",
        "synchronous",
        "table",
        "tainted",
        "tokens",
        "wants_logprobs",
        "wants_prompt_logprobs",
    )

    def __init__(self, request: EngineRequest, number: int, *, speculative: bool) -> None:
        params = request.params
        self.request = request
        self.number = number
        """In order of arrival."""
        self.order = (params.priority, number)
        """Whoever has the least gets a place first, and keeps it."""
        self.status = Status.WAITING
        self.tokens = list(request.prompt)
        """Prompt and the generated tokens that were read."""
        self.num_prompt = len(self.tokens)
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.num_written = 0
        """With speculation: tokens that were written to the ring, rejected ones included, if more than num_computed."""
        self.max_length = self.num_prompt + request.max_tokens
        self.in_flight = 0
        """Submitted steps with this sequence whose results were not read."""
        self.table: BlockTable
        """Its place; only while it has one."""
        self.next_boundary = 0
        """The next start of a step at which pages and snapshots must be seen to."""
        self.boundaries: list[int] = []
        """Where prefill is cut for a snapshot."""
        self.kept_boundary = 0
        """The last one at which a snapshot was taken."""
        self.admitted = False
        """Whether it ever had a place."""
        self.tainted = False
        """Whether what it computed must not be used again."""
        self.cached_tokens = 0
        """Prompt tokens that prefix caching saved, when it first ran."""
        self.has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.constrained = bool(request.grammar or params.logit_bias or params.min_tokens)
        """Whether a grammar or a bias may forbid tokens."""
        self.lookup: PromptLookup | None = None
        """Proposes its next tokens. Only where no draw depends on the one before: penalties count the draws, a
        grammar's mask follows from them, and the bias that holds stop tokens back ends with one of them. Logprobs are
        the model's own and may be asked for."""
        if speculative and not (self.has_penalties or self.constrained):
            self.lookup = PromptLookup(self.tokens)
        self.synchronous = False
        """Whether its last token must be known here before its next step is made."""
        self.mask: object = None
        """What its slot's token mask was set from in a free part of its grammar; None where it must be set anew."""
        self.update_synchronous()
        self.parsing = False
        """Whether it is not known yet what its grammar allows after its last token."""
        self.biased = False
        """Whether its slot has a logit bias."""
        self.banning = False
        """Whether that bias holds stop tokens back until min_tokens."""
        self.wants_logprobs = params.wants_logprobs
        self.num_top = params.logprobs or 0
        self.logprob_token_ids = params.logprob_token_ids or ()
        self.needs_logits = needs_logits(params, constrained=self.constrained or self.has_penalties)
        """Whether the logits of its draws must come back for them."""
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        """Until they are handed out."""
        self.prompt_logprobs: list[TokenOutput | None] = [None]
        row = params.row(0, 0)
        self.draw_head = (
            row.temperature,
            row.top_k,
            row.top_p,
            row.min_p,
            row.repetition_penalty,
            row.presence_penalty,
            row.frequency_penalty,
            row.seed,
        )
        """The fields of RowSampling that are the same for every draw."""

    def restart(self) -> None:
        """Forget its place and all that was computed: it waits, to be computed again from the tokens known here."""
        self.status = Status.WAITING
        self.num_tokens = len(self.tokens)
        self.num_computed = self.num_written = self.in_flight = 0
        self.tainted = False
        if hasattr(self, "table"):
            del self.table

    def update_synchronous(self) -> None:
        """See `synchronous`, which follows where its grammar stands."""
        grammar = self.request.grammar
        self.synchronous = self.lookup is not None or (grammar is not None and grammar.triggers is None)

    def drop_ahead(self) -> None:
        """What was drawn behind its last known token does not count: it is drawn again, by another step.

        K and V of that token stay, and are written once more.
        """
        # The ring has them, and so has lost what stood there a round before.
        self.num_written = max(self.num_written, self.num_computed)
        self.num_tokens = len(self.tokens)
        self.num_computed = self.num_tokens - 1

    @property
    def num_generated(self) -> int:
        """Generated tokens that were read."""
        return len(self.tokens) - self.num_prompt
