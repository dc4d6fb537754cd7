"""Runs Flint engines. `from flint_runtime import LLM, AsyncLLM, SamplingParams`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flint_runtime.async_llm import AsyncLLM as AsyncLLM
    from flint_runtime.llm import LLM as LLM
    from flint_runtime.outputs import CompletionOutput as CompletionOutput
    from flint_runtime.outputs import RequestOutput as RequestOutput
    from flint_runtime.prompts import TextPrompt as TextPrompt
    from flint_runtime.prompts import TokensPrompt as TokensPrompt
    from flint_runtime.sampling_params import RequestOutputKind as RequestOutputKind
    from flint_runtime.sampling_params import SamplingParams as SamplingParams
    from flint_runtime.sampling_params import StructuredOutputsParams as StructuredOutputsParams

# Imported when asked for: the command line and the builder need none of it, and numpy takes its time.
_HOME = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "LLM": "llm",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
