"""/v1/completions: from a body to what the engine is asked."""

from __future__ import annotations

import time
from functools import partial

from flint_runtime.errors import UsageError, shown
from flint_runtime.prompts import split_prompts
from flint_runtime.server.chat import cut_prompt
from flint_runtime.server.completion_format import CompletionFormat
from flint_runtime.server.endpoint import Plan
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.protocol.common import sampling_params, structured_outputs
from flint_runtime.server.protocol.completion import CompletionRequest
from flint_runtime.server.service import Service

_MOST_PROMPTS = 2048
_DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's."""


class CompletionApi:
    """An `endpoint.Api`."""

    model = CompletionRequest
    id_prefix = "cmpl-"

    def plan(self, service: Service, body: CompletionRequest, request_id: str) -> Plan:
        """See `endpoint.Api`."""
        service.check_model(body.model)
        body.refuse_unserved()
        if body.suffix:
            raise UsageError("suffix must be left out: Flint continues a text, it does not fill gaps.")
        if body.stream and body.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs must be left out of a stream; use echo and logprobs.")
        prompts = [cut_prompt(service, prompt, body.truncate_prompt_tokens) for prompt in _prompts(body.prompt)]
        max_tokens = _DEFAULT_MAX_TOKENS if "max_tokens" not in body.model_fields_set else body.max_tokens
        # Who wants the prompt's logprobs only asks for no token. The engine draws one, which nobody is shown.
        prompt_only = bool(body.echo) and max_tokens == 0
        changed = {}
        if body.echo and body.logprobs is not None:
            changed["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        params = sampling_params(
            body,
            max_tokens=1 if prompt_only else max_tokens,
            logprobs=body.logprobs,
            structured=structured_outputs(body),
            **changed,
        )
        return Plan(
            prompts=prompts,
            params=params,
            stream=bool(body.stream),
            make_format=partial(
                CompletionFormat,
                request_id=request_id,
                created=int(time.time()),
                model=service.settings.model_names[0] if body.model is None else body.model,
                body=body,
                tokenizer=service.llm.tokenizer,
                prompt_only=prompt_only,
            ),
        )

    def error_body(self, error: ErrorReply) -> bytes:
        """See `endpoint.Api`."""
        return error.body()


def _prompts(given: object) -> list[str | list[int]]:
    """A text, texts, token ids or lists of them, as prompts. Raises UsageError."""
    if not isinstance(given, str | list) or not given:
        raise UsageError(
            f"prompt must be a text, texts, token ids or lists of them, and not empty; found {shown(given)}."
        )
    found = split_prompts(given)
    if len(found) > _MOST_PROMPTS:
        raise UsageError(f"prompt must be at most {_MOST_PROMPTS} prompts, found {len(found)}.")
    wrong = [one for one in found if not isinstance(one, str | list)]
    if wrong:
        raise UsageError(f"prompt must be a text, texts, token ids or lists of them, found {shown(wrong[0])} in it.")
    return found
