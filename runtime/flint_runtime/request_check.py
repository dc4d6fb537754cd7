"""What is checked of a request before the core takes it: everything that a step would pack, against this engine.

A step holds the tokens and numbers of many requests; one that does not fit would cost all of them the step. So the
core asks here first, whoever made the request and whatever was checked before.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flint_runtime.errors import UsageError, shown
from flint_runtime.executors.step import STEP_ARRAYS, RowSampling
from flint_runtime.request import EngineRequest

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT32 = np.iinfo(np.int32)
_NUMBERS = [name for name in RowSampling._fields if name in STEP_ARRAYS and name != "seed"]
"""What a step packs of a request's parameters; a seed is cut to 64 bits."""


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what this engine cannot serve.

    Args:
        vocab_size: tokens that the model knows.
        max_model_len: most tokens of a prompt and its answer.
    Raises:
        UsageError: naming the parameter, what was expected and what was found.
    """
    check_id(request.request_id)
    _check_prompt(request.prompt, vocab_size)
    _check_lengths(request, max_model_len)
    _check_tokens("stop_token_ids", request.stop_token_ids - request.eos_token_ids, vocab_size)
    _check_tokens("The engine's eos_token_id", request.eos_token_ids, vocab_size)
    _check_bias(request.params.logit_bias, vocab_size)
    _check_numbers({name: getattr(request.params, name) for name in _NUMBERS if hasattr(request.params, name)})
    try:
        row = request.params.row(0, 0)
    except Exception as error:
        raise UsageError(f"The sampling parameters cannot be used: {type(error).__name__}: {error}.") from error
    _check_numbers({name: getattr(row, name) for name in _NUMBERS})


def check_id(request_id: object) -> None:
    """Raise UsageError unless it is a text that is not empty."""
    if not isinstance(request_id, str) or not request_id:
        raise UsageError(f"request_id must be a text that is not empty, found {shown(request_id)}.")


def _check_prompt(prompt: object, vocab_size: int) -> None:
    try:
        tokens = np.frombuffer(array("i", prompt), np.int32)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"The prompt must be token ids from 0 to {vocab_size - 1}, found {shown(prompt)} ({error})."
        ) from None
    if not tokens.size:
        raise UsageError("The prompt is empty; a generation needs at least one token to start from.")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UsageError(
            f"The prompt has token ids from {tokens.min()} to {tokens.max()}, some outside the vocabulary of "
            f"{vocab_size}. Encode it with this engine's tokenizer."
        )


def _check_lengths(request: EngineRequest, max_model_len: int) -> None:
    count, most = len(request.prompt), request.max_tokens
    if type(most) is not int or most < 1 or count + most > max_model_len:
        raise UsageError(
            f"The prompt has {count} tokens and max_tokens is {shown(most)}: together they must be at most "
            f"{max_model_len} (max_model_len), and max_tokens at least 1. Shorten the prompt or lower max_tokens."
        )
    if type(request.params.min_tokens) is not int:
        raise UsageError(f"min_tokens must be a whole number, found {shown(request.params.min_tokens)}.")


def _check_tokens(name: str, tokens: Iterable[Any], vocab_size: int) -> None:
    outside = [token for token in tokens if type(token) is not int or not 0 <= token < vocab_size]
    if outside:
        found = ", ".join(f"{shown(token)}" for token in outside[:5])
        raise UsageError(f"{name} has token ids [{found}] outside the vocabulary of {vocab_size}. Leave them out.")


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    _check_tokens("logit_bias", bias, vocab_size)
    for token, value in bias.items():
        if value != -math.inf and not _fits_float32(value):
            raise UsageError(f"logit_bias of token {token} must be a number, found {shown(value)}.")


def _check_numbers(values: Mapping[str, object]) -> None:
    """Each fits the array of the step that it goes to."""
    for name, value in values.items():
        if STEP_ARRAYS[name][0] is np.float32:
            if not _fits_float32(value):
                raise UsageError(
                    f"{name} must be a number that fits 32 bits (at most {_FLOAT32_MAX:.2g}), found {shown(value)}."
                )
        elif type(value) is not int or not _INT32.min <= value <= _INT32.max:
            raise UsageError(f"{name} must be a whole number that fits 32 bits, found {shown(value)}.")


def _fits_float32(value: object) -> bool:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and abs(float(value)) <= _FLOAT32_MAX
    except OverflowError:  # an int of more than 1,024 bits
        return False
