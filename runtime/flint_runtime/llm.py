"""LLM: answers to many prompts at once, for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from flint_runtime.engine_core import CoreConfig
from flint_runtime.errors import UsageError
from flint_runtime.executors import ExecutorChoice
from flint_runtime.llm_engine import LLMEngine, PreparedRequest, Prompt
from flint_runtime.outputs import RequestOutput
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from flint_runtime.tokenizer import Message, Tokenizer, Tool


class LLM:
    """An engine that answers prompts. Not thread-safe; `AsyncLLM` serves requests as they come."""

    def __init__(self, engine_dir: str | Path, executor: ExecutorChoice = "auto", **core_config: Any) -> None:
        """Open an engine directory.

        Args:
            executor: what runs the graph; "auto" takes a GPU where the engine fits it, else the CPU.
            core_config: fields of `CoreConfig`: max_num_seqs, max_model_len, gpu_memory_utilization,
                enable_prefix_caching, num_speculative_tokens and others.
        Raises:
            EngineError: the directory is damaged or cannot be run here.
            ResourceError: it does not fit the GPU.
        """
        self._engine = LLMEngine.open(Path(engine_dir), executor, CoreConfig(**core_config))
        self._next_id = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, each a text or token ids; one or many.

        Args:
            sampling_params: for all, or one per prompt.
            use_tqdm: whether to show progress on stderr.
        Returns:
            one output per prompt, in their order. A request that fails alone has finish_reason "error".
        Raises:
            UsageError: a request cannot be served; none is.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        every = cast("Sequence[Prompt]", [prompts] if one else prompts)
        params = _per_request(sampling_params, len(every))
        requests = [self._engine.prepare(self._id(), p, s) for p, s in zip(every, params, strict=True)]
        return self._run_all(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, one or many, rendered by the checkpoint's chat template; see `generate`."""
        one = len(messages) > 0 and not isinstance(messages[0], Sequence)
        every = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        kwargs = chat_template_kwargs or {}
        params = _per_request(sampling_params, len(every))
        requests = [
            self._engine.prepare_chat(self._id(), m, s, tools, **kwargs) for m, s in zip(every, params, strict=True)
        ]
        return self._run_all(requests, use_tqdm)

    def snapshot(self) -> dict[str, Any]:
        """Every metric as plain values; see `Metrics.snapshot`."""
        return self._engine.snapshot()

    def close(self) -> None:
        """Free the executor and its memory."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _id(self) -> str:
        self._next_id += 1
        return str(self._next_id)

    def _run_all(self, requests: list[PreparedRequest], show_progress: bool) -> list[RequestOutput]:
        from flint_runtime.console import count_progress  # rich takes a while to import

        found: dict[str, RequestOutput] = {}
        with count_progress("generate", len(requests), "requests") if show_progress else nullcontext() as progress:
            for output in self._outputs(requests):
                found[output.request_id] = output
                if progress is not None:
                    progress.advance(1)
        return [found[request.request_id] for request in requests]

    def _outputs(self, requests: Iterable[PreparedRequest]) -> Iterable[RequestOutput]:
        """Final outputs as they come; whatever stops it, Ctrl-C among it, no request is left behind."""
        engine = self._engine
        engine.abort_all()  # What a second Ctrl-C, while the last ones were aborted, has left.
        try:
            for request in requests:
                engine.add_request(_final_only(request))
            while engine.has_unfinished_requests():
                yield from engine.step()
        finally:
            engine.abort_all()


def _per_request(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UsageError(f"sampling_params has {len(params)} entries for {count} prompts; pass one, or one per prompt.")
    return params


def _final_only(request: PreparedRequest) -> PreparedRequest:
    kind = RequestOutputKind.FINAL_ONLY
    return replace(request, choices=[replace(c, params=replace(c.params, output_kind=kind)) for c in request.choices])
