"""SamplingParams: what a request wants of its answer. Names and meanings are vLLM's."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from flint_plugins.ops import MAX_LOGPROBS
from flint_runtime.errors import UsageError
from flint_runtime.executors.step import RowSampling
from flint_runtime.small_files import json_object, shown

FLINT_DEFAULTS: dict[str, float | int] = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
"""What the released model recommends; a generation_config.json overrides it."""
_NEUTRAL: dict[str, float | int] = {"min_p": 0.0, "repetition_penalty": 1.0}
_SEED_BITS = (1 << 64) - 1
_LARGEST = 2**31 - 1
_MOST_CHOICES = 128
"""As OpenAI's API has it."""


class RequestOutputKind(Enum):
    """Which outputs a request gives while it runs."""

    CUMULATIVE = "cumulative"
    """Everything so far, at every step."""
    DELTA = "delta"
    """What is new, at every step."""
    FINAL_ONLY = "final_only"
    """Everything, at the end."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an answer must match: exactly one of these.

    json: a JSON schema, as a dict or its text. regex: a regular expression in the syntax of Rust's regex crate, for the
    whole text. choice: the texts to choose from. grammar: a context-free grammar in Lark's or in GBNF syntax.

    Raises:
        UsageError: none or several are given, or one has a wrong type. What they say is checked by the compiler
            (`flint_runtime.structured`).
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise UsageError(f"structured_outputs needs exactly one of json, regex, choice and grammar, found {found}.")
        value = getattr(self, given[0])
        if given == ["choice"]:
            if isinstance(value, str) or not value or not all(isinstance(text, str) and text for text in value):
                raise UsageError(f"structured_outputs.choice must be a list of texts, found {value!r}.")
            object.__setattr__(self, "choice", tuple(value))
        elif not isinstance(value, str if given != ["json"] else str | Mapping):
            raise UsageError(f"structured_outputs.{given[0]} must be a text, found {value!r}.")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. None means: the checkpoint's default (`with_defaults`).

    temperature 0 is greedy; top_k 0 or -1 and top_p 1 are off. Without a seed every run differs. n answers are drawn
    with seed, seed + 1, …. logit_bias, -100 to 100 by token id, is added to the logits before anything else.

    Without max_tokens a request runs to the end of the context. An answer ends at an end-of-sequence token (unless
    ignore_eos), at any of stop_token_ids, and where its text, behind the thinking part, has one of the texts `stop`:
    none of them before min_tokens. The text has neither the stop nor the stop token (unless
    include_stop_str_in_output), and special tokens not at all (unless skip_special_tokens is false).

    logprobs: how many of the likeliest tokens to report at every token, at most 20, besides the token itself;
    prompt_logprobs: the same for every token of the prompt. They are of the model's own distribution.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, open_low=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("top_k", -1, _LARGEST)
        self._integer("seed", -(2**63), 2**64 - 1)
        self._integer("n", 1, _MOST_CHOICES)
        self._integer("max_tokens", 1, _LARGEST)
        self._integer("min_tokens", 0, _LARGEST)
        self._integer("logprobs", 0, MAX_LOGPROBS)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, found {getattr(self, name)!r}.")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise UsageError(
                f"structured_outputs must be StructuredOutputsParams, found {type(self.structured_outputs).__name__}."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens must be at most max_tokens ({self.max_tokens}), found {self.min_tokens}.")
        if self.n > 1 and self.temperature == 0:
            raise UsageError(f"n must be 1 at temperature 0, where all answers are the same; found {self.n}.")
        # None, as JSON's null, is the same as nothing.
        object.__setattr__(self, "stop", _texts(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias or {}))

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        if value is not None and (not _is_finite(value) or not low <= value <= high or (open_low and value == low)):
            ending = f"to {high:g}" if high < math.inf else "on"
            start = f"above {low:g} and up" if open_low else f"from {low:g}"
            raise UsageError(f"{name} must be a number {start} {ending}, found {value!r}.")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        # None is a value only where it is the default.
        optional = type(self).__dataclass_fields__[name].default is None
        if (value is None and optional) or (type(value) is int and low <= value <= high):
            return
        raise UsageError(f"{name} must be a whole number from {low} to {high}, found {value!r}.")

    def with_defaults(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Fill what is None from the checkpoint's defaults (`generation_defaults`); draw a seed where there is none."""
        every: dict[str, Any] = {**_NEUTRAL, **FLINT_DEFAULTS, **defaults, "seed": secrets.randbits(64)}
        return replace(self, **{n: every[n] for n in every if getattr(self, n) is None})

    def choice(self, index: int) -> SamplingParams:
        """The parameters of one of the n answers; only after `with_defaults`. The first alone reports the prompt."""
        seed = ((self.seed or 0) + index) & _SEED_BITS
        return replace(self, n=1, seed=seed, prompt_logprobs=None if index else self.prompt_logprobs)

    def row(self, draw_index: int, sample_slot: int) -> RowSampling:
        """What the executor needs to draw the `draw_index`-th token; only after `with_defaults`."""
        seed = (self.seed or 0) & _SEED_BITS
        values: dict[str, Any] = {name: getattr(self, name) for name in _ROW_FIELDS}
        assert None not in values.values(), "with_defaults was not called"
        return RowSampling(
            **values,
            seed=(seed & 0xFFFFFFFF, seed >> 32),
            draw_index=draw_index,
            sample_slot=sample_slot,
            use_bias=bool(self.logit_bias),
            use_mask=self.structured_outputs is not None,
        )


_ROW_FIELDS = tuple(RowSampling.__annotations__.keys() & SamplingParams.__annotations__.keys() - {"seed"})


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _texts(stop: object) -> tuple[str, ...]:
    """Stop texts; a single one may stand alone."""
    found = (stop,) if isinstance(stop, str) else stop
    if not isinstance(found, Sequence) or not all(isinstance(text, str) and text for text in found):
        raise UsageError(f"stop must be texts that are not empty, found {stop!r}.")
    return tuple(found)


def _token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or any(type(token) is not int or token < 0 for token in ids):
        raise UsageError(f"stop_token_ids must be token ids, found {ids!r}.")
    return tuple(ids)


def _biases(bias: object) -> dict[int, float]:
    """logit_bias with integer keys: JSON has only texts."""
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, found {bias!r}.")
    found = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if type(token) is not int or token < 0 or not _is_finite(value) or not -100 <= value <= 100:
            raise UsageError(f"logit_bias must map token ids to numbers from -100 to 100, found {key!r}: {value!r}.")
        found[token] = float(value)
    return found


def generation_defaults(data: bytes) -> tuple[dict[str, float | int], tuple[int, ...]]:
    """Sampling defaults and end-of-sequence ids of a generation_config.json.

    A checkpoint with do_sample false is greedy by default.

    Raises:
        ValueError: the file is not a generation config.
    """
    raw = json_object(data)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: raw[name] for name in names if raw.get(name) is not None}
    if raw.get("do_sample") is False:
        defaults["temperature"] = 0.0
    eos = raw.get("eos_token_id")
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id is {shown(eos)}, expected a token id or a list of them")
    try:
        SamplingParams(**defaults)
    except UsageError as error:
        raise ValueError(str(error).rstrip(".")) from None
    return defaults, ids
