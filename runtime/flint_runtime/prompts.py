"""Prompts in the forms that vLLM takes: a text, token ids, or a dict with either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from flint_runtime.arguments import text, whole_number
from flint_runtime.errors import UsageError, shown


class TextPrompt(TypedDict):
    """A text, in which special tokens are recognised."""

    prompt: str


class _TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_TokensPrompt, total=False):
    """Token ids, and the text that they came from, which is only reported."""

    prompt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""A text, in which special tokens are recognised, token ids, or a dict with either."""

_FORMS = 'a text, token ids, or a dict such as {"prompt": "Hi"} or {"prompt_token_ids": [1, 2]}'


def split_prompt(prompt: object) -> tuple[str | None, list[int] | None]:
    """A prompt's text and its token ids: one of them, or both where a dict has them. Raises UsageError."""
    if isinstance(prompt, str):
        return text("The prompt", prompt), None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt)
    unknown = [name for name in prompt if name not in ("prompt", "prompt_token_ids") and prompt[name] is not None]
    if unknown:
        raise UsageError(f"A prompt may have prompt and prompt_token_ids, found {shown(unknown[0])}. Leave it out.")
    written, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if written is None and ids is None:
        raise UsageError(f"The prompt must be {_FORMS}; found {shown(prompt)}.")
    found = None if written is None else text("The prompt", written)
    return found, None if ids is None else _token_ids(ids)


def split_prompts(prompts: object) -> list[Any]:
    """One prompt or many, as a list of them. Raises UsageError where it is neither.

    A list of whole numbers is one prompt; so is an array of one dimension, and one of two is many.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    every = _listed(prompts)
    if every is None:
        raise UsageError(f"prompts must be {_FORMS}, or a list of such; found {shown(prompts)}.")
    return [every] if every and whole_number(every[0]) is not None else every


def _token_ids(ids: object) -> list[int]:
    every = _listed(ids)
    if every is None:
        raise UsageError(f"The prompt must be {_FORMS}; found {shown(ids)}.")
    if all([type(token) is int for token in every]):  # A list: some times faster, and there may be 100,000.
        return every
    found = []
    for index, token in enumerate(every):
        number = whole_number(token)
        if number is None:
            raise UsageError(f"The prompt's token ids must be whole numbers, found {shown(token)} at {index}.")
        found.append(number)
    return found


def _listed(values: object) -> list[Any] | None:
    """The members of a list, tuple or array; None for anything else, bytes among it."""
    if isinstance(values, str | bytes | bytearray | memoryview):
        return None
    if isinstance(values, Sequence):
        return list(values)
    if getattr(values, "ndim", 0) and hasattr(values, "tolist"):
        found: list[Any] = values.tolist()
        return found
    return None
