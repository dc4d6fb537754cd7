"""LLM: answers to many prompts at once, for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from flint_runtime.errors import UsageError, shown
from flint_runtime.executors import ExecutorChoice
from flint_runtime.llm_engine import PreparedRequest, engine_opener
from flint_runtime.outputs import RequestOutput
from flint_runtime.prompts import Prompt, split_prompts
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from flint_runtime.tokenizer import Message, Tokenizer, Tool


class LLM:
    """An engine that answers prompts. Not thread-safe; `AsyncLLM` serves requests as they come."""

    def __init__(
        self, model: str | Path, executor: ExecutorChoice = "auto", *, seed: int | None = None, **core_config: Any
    ) -> None:
        """Open an engine.

        Args:
            model: the engine's directory.
            executor: what runs the graph; "auto" takes a GPU where the engine fits it, else the CPU.
            seed: makes the answers of a whole run reproducible, also to requests without a seed.
            core_config: fields of `CoreConfig`: max_num_seqs, max_model_len, gpu_memory_utilization,
                enable_prefix_caching, num_speculative_tokens and others.
        Raises:
            UsageError: an argument is wrong.
            EngineError: the directory is damaged or cannot be run here.
            ResourceError: it does not fit the GPU.
        """
        self._engine = engine_opener(model, executor, seed, core_config)()
        self._next_id = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's."""
        return self._engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the checkpoint's defaults, and no seed."""
        return replace(SamplingParams().with_defaults(self.tokenizer.defaults), seed=None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, one or many, each a text, token ids, or a dict as vLLM has it.

        Args:
            sampling_params: for all, or one per prompt. Their output_kind does not matter: only whole answers return.
            use_tqdm: whether to show progress on stderr.
        Returns:
            one output per prompt, in their order. A request that fails alone has finish_reason "error".
        Raises:
            UsageError: a request cannot be served; none is.
        """
        every = split_prompts(prompts)
        params = _per_request(sampling_params, len(every))
        requests = [self._engine.prepare(self._id(), p, s) for p, s in zip(every, params, strict=True)]
        return self._run_all(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, one or many; see `generate`.

        Args:
            chat_template: in place of the checkpoint's.
            add_generation_prompt: whether to start a new answer.
            continue_final_message: go on with the last message instead.
            tools: what the model may call.
            chat_template_kwargs: whatever else the template reads, such as enable_thinking.
        """
        every = _conversations(messages)
        params = _per_request(sampling_params, len(every))
        requests = [
            self._engine.prepare_chat(
                self._id(),
                conversation,
                own,
                tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation, own in zip(every, params, strict=True)
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


def _conversations(messages: object) -> list[Any]:
    """One conversation or many, as a list of them; what is in them is checked when they are rendered."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray | memoryview):
        raise UsageError(
            f'messages must be a list such as [{{"role": "user", "content": "Hi"}}], or a list of such lists; found '
            f"{shown(messages)}."
        )
    many = all(isinstance(entry, Sequence) and not isinstance(entry, str | bytes) for entry in messages)
    return list(messages) if many else [messages]


def _per_request(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise UsageError(f"sampling_params must be SamplingParams, or a list of them; found {shown(params)}.")
    if len(params) != count:
        raise UsageError(f"sampling_params has {len(params)} entries for {count} prompts; pass one, or one per prompt.")
    return params


def _final_only(request: PreparedRequest) -> PreparedRequest:
    kind = RequestOutputKind.FINAL_ONLY
    return replace(request, choices=[replace(c, params=replace(c.params, output_kind=kind)) for c in request.choices])
