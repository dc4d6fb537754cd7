"""From the core's tokens to what requests return: text, stop texts, logprobs, n answers side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from flint_runtime.detokenizer import Detokenizer
from flint_runtime.metrics import Metrics, RequestRecord
from flint_runtime.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from flint_runtime.request import CoreOutput, EngineRequest, FinishReason, TokenOutput
from flint_runtime.sampling_params import RequestOutputKind
from flint_runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Holds every running request's text. Used by the thread that steps the core."""

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._requests: dict[str, _Request] = {}
        self._choices: dict[str, _Choice] = {}
        """By the id that the core knows."""

    def __len__(self) -> int:
        """Requests that are running."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add_request(self, request_id: str, prompt: str | None, choices: list[EngineRequest]) -> None:
        """Start a request: its prompt's text if it came as one, and what the core was given for its n answers."""
        request = _Request(request_id, prompt, choices, self._tokenizer)
        self._requests[request_id] = request
        self._choices |= {choice.core_id: choice for choice in request.choices}

    def request_ids(self) -> list[str]:
        """Of the requests that are running."""
        return list(self._requests)

    def forget(self, request_id: str) -> None:
        """Drop a request without an output; an unknown one is none."""
        request = self._requests.pop(request_id, None)
        for choice in request.choices if request else ():
            self._choices.pop(choice.core_id, None)

    def process(self, outputs: Iterable[CoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take in what a step brought.

        Returns:
            what there is to report, one per request at most, and the ids that the core must abort: answers that a stop
            text ended, requests that failed here, and what nobody knows here.
        """
        now = time.monotonic()
        touched: dict[str, _Request] = {}
        aborts = []
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                aborts.append(output.request_id)
                continue
            request = choice.request
            touched[request.request_id] = request
            try:
                self._measure(request, output, now)
                choice.take(output)
            except Exception as error:
                logger.exception("Request %r failed.", request.request_id)
                aborts += self._end(request, "error", f"Its output could not be made: {type(error).__name__}: {error}.")
                continue
            if choice.finish_reason is not None:
                del self._choices[choice.core_id]
                if output.finish_reason is None:
                    aborts.append(choice.core_id)
        reports = [self._report(request, now) for request in touched.values()]
        return [report for report in reports if report is not None], aborts

    def abort(self, request_id: str) -> tuple[RequestOutput, list[str]]:
        """End a request that `add_request` knows: its last output, and the ids that the core must abort."""
        return self._last_output(self._requests[request_id], "abort", None)

    def fail_all(self, error: str) -> list[RequestOutput]:
        """End every request with an error: their last outputs."""
        return [self._last_output(request, "error", error)[0] for request in list(self._requests.values())]

    def _last_output(
        self, request: _Request, reason: FinishReason, error: str | None
    ) -> tuple[RequestOutput, list[str]]:
        aborts = self._end(request, reason, error)
        report = self._report(request, time.monotonic())
        assert report is not None
        return report, aborts

    def _end(self, request: _Request, reason: FinishReason, error: str | None) -> list[str]:
        """End a request's answers that are running: the ids that the core must abort."""
        running = [choice for choice in request.choices if choice.finish_reason is None]
        for choice in running:
            self._choices.pop(choice.core_id, None)
            try:
                choice.end(reason, error)
            except Exception:  # Then without the text that was held back.
                logger.exception("Request %r: its text could not be completed.", request.request_id)
                choice.close(reason, error)
        return [choice.core_id for choice in running]

    def _measure(self, request: _Request, output: CoreOutput, now: float) -> None:
        """Count an output's tokens and the time since the request's last; called before they are taken in."""
        metrics, count = self._metrics, len(output.tokens)
        request.cached_tokens = max(request.cached_tokens, output.cached_tokens)
        if not count:
            return
        metrics.generation_tokens += count
        choice = self._choices[output.request_id]
        if request.first_token_time is None:
            request.first_token_time = now
            metrics.time_to_first_token_seconds.observe(now - request.arrival)
        if choice.last_token_time is not None:
            metrics.inter_token_latency_seconds.observe((now - choice.last_token_time) / count, count)
        choice.last_token_time = now

    def _report(self, request: _Request, now: float) -> RequestOutput | None:
        if not request.unfinished:
            del self._requests[request.request_id]
            try:
                self._metrics.finish(request.record(now))
            except Exception:  # A count or a log line that is wrong costs nobody an answer.
                logger.exception("Request %r could not be counted.", request.request_id)
        elif request.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return request.output()


class _Request:
    """What is known of a running request."""

    def __init__(self, request_id: str, prompt: str | None, choices: list[EngineRequest], tokenizer: Tokenizer) -> None:
        first = choices[0]
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, first.prompt
        self.output_kind = first.params.output_kind
        self.arrival = first.arrival
        self.first_token_time: float | None = None
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        thinking = tokenizer.opens_thinking(first.prompt)
        self.choices = [_Choice(self, i, core, tokenizer, thinking) for i, core in enumerate(choices)]

    @property
    def unfinished(self) -> bool:
        """Whether an answer still runs. Not counted, so that no interrupt can make it wrong."""
        return any(choice.finish_reason is None for choice in self.choices)

    def output(self) -> RequestOutput:
        """The next output, in the form that the request wants."""
        delta = self.output_kind is RequestOutputKind.DELTA
        last = [choice.last_token_time for choice in self.choices if choice.last_token_time is not None]
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [choice.output(delta) for choice in self.choices if choice.changed or not delta],
            not self.unfinished,
            self.prompt_logprobs,
            self.cached_tokens,
            RequestMetrics(self.arrival, self.first_token_time, max(last, default=None)),
        )
        if delta:
            self.prompt_logprobs = None
        return output

    def record(self, now: float) -> RequestRecord:
        """What to count and log of a finished request."""
        started = [choice.core.scheduled for choice in self.choices if choice.core.scheduled is not None]
        first = self.first_token_time
        return RequestRecord(
            self.request_id,
            [choice.finish_reason for choice in self.choices if choice.finish_reason is not None],
            len(self.prompt_token_ids),
            self.cached_tokens,
            sum(choice.generated for choice in self.choices),
            min(started) - self.arrival if started else None,
            None if first is None else first - self.arrival,
            now - self.arrival,
            [choice.error for choice in self.choices if choice.error is not None],
        )


class _Choice:
    """One of a request's answers. With DELTA, text, tokens and logprobs are those not yet reported."""

    def __init__(
        self, request: _Request, index: int, core: EngineRequest, tokenizer: Tokenizer, thinking: bool
    ) -> None:
        self.request, self.index, self.core, self.core_id = request, index, core, core.request_id
        self._params, self._stop_tokens, self._eos = core.params, core.stop_token_ids, core.eos_token_ids
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, core.params, thinking)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] | None = [] if core.params.wants_logprobs else None
        self._cumulative_logprob = 0.0
        self.generated = 0
        self.changed = False
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self.error: str | None = None

    def take(self, output: CoreOutput) -> None:
        """Take in new tokens, up to one that completes a stop text."""
        if output.prompt_logprobs is not None and self.request.prompt_logprobs is None:
            count = self._params.prompt_logprobs or 0
            self.request.prompt_logprobs = [token and self._describe(token, count) for token in output.prompt_logprobs]
        self.changed = True
        for token in output.tokens:
            self._add(token)
            if token.token_id in self._stop_tokens:
                # The token that ended the answer is part of its text only if asked for.
                if token.token_id not in self._eos:
                    self._stop_reason = token.token_id
                if not self._params.include_stop_str_in_output:
                    break
            self._pieces.append(self._detokenizer.add(token.token_id))
            if self._detokenizer.stop_text is not None:
                break
        if self._detokenizer.stop_text is not None or output.finish_reason is not None:
            self.end(output.finish_reason or "stop", output.error)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """No more tokens come: flush the text, in which a stop text may still be found."""
        if self._detokenizer.stop_text is None:
            self._pieces.append(self._detokenizer.finish())
        if self._detokenizer.stop_text is not None:
            reason, self._stop_reason, error = "stop", self._detokenizer.stop_text, None
        self.close(reason, error)

    def close(self, reason: FinishReason, error: str | None) -> None:
        """No more tokens and no more text come."""
        self.changed = True
        self.error, self.finish_reason = error, reason

    def output(self, delta: bool) -> CompletionOutput:
        """The answer so far or, with `delta`, what is new of it."""
        logprobs, text = self._logprobs, "".join(self._pieces)
        output = CompletionOutput(
            self.index,
            text,
            self._token_ids if delta else list(self._token_ids),
            self._cumulative_logprob,
            logprobs if delta or logprobs is None else list(logprobs),
            self.finish_reason,
            self._stop_reason,
            self.error,
            self._detokenizer.marks if delta else list(self._detokenizer.marks),
        )
        self._pieces = [] if delta else [text]
        if delta:
            self._token_ids, self._detokenizer.marks, self.changed = [], [], False
            self._logprobs = None if logprobs is None else []
        return output

    def _add(self, token: TokenOutput) -> None:
        self.generated += 1
        self._token_ids.append(token.token_id)
        self._cumulative_logprob += token.logprob
        if self._logprobs is not None:
            self._logprobs.append(self._describe(token, self._params.logprobs or 0))

    def _describe(self, token: TokenOutput, count: int) -> Logprobs:
        """A token's logprob and those of the `count` likeliest."""
        found = {token.token_id: self._logprob(token.token_id, token.logprob, token.rank)}
        ranks = token.top_ranks or range(1, count + 1)
        for other, logprob, rank in zip(token.top_tokens, token.top_logprobs, ranks, strict=False):
            if other != token.token_id:
                found[other] = self._logprob(other, logprob, rank)
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int | None) -> Logprob:
        data = self._tokenizer.token_bytes(token_id)
        return Logprob(logprob, rank, data.decode("utf-8", "replace") if self._params.detokenize else None, data)
