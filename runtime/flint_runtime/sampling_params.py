"""SamplingParams: what a request wants of its answer. Names and meanings are vLLM's."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from flint_plugins.ops import MAX_LOGPROBS
from flint_runtime import arguments
from flint_runtime.errors import UsageError, shown
from flint_runtime.executors.step import RowSampling
from flint_runtime.small_files import json_object

FLINT_DEFAULTS: dict[str, float | int] = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
"""What the released model recommends; a generation_config.json overrides it."""
_NEUTRAL: dict[str, float | int] = {"min_p": 0.0, "repetition_penalty": 1.0}
_SEED_BITS = (1 << 64) - 1
_LARGEST = 2**31 - 1
_MOST_CHOICES = 128
"""As OpenAI's API has it."""
_MOST_STOPS = 16
"""Stop texts: every one is looked for at every character. OpenAI's API and vLLM's server take 4."""
_LONGEST_STOP = 1000
MAX_BAD_WORDS = 128
"""As vLLM has it."""
_LONGEST_BAD_WORD = 1000
MAX_LOGPROB_TOKEN_IDS = 128
"""As vLLM has it."""


class RequestOutputKind(Enum):
    """Which outputs a request gives while it runs."""

    CUMULATIVE = 0
    """Everything so far, at every step."""
    DELTA = 1
    """What is new, at every step."""
    FINAL_ONLY = 2
    """Everything, at the end."""


@dataclass(frozen=True)
class CallParams:
    """What holds for the calls of an answer; made by `flint_runtime.chat.call_grammar`.

    grammar: of one call, from behind <tool_call> to </tool_call>, in Lark's syntax. free: text may stand around calls,
    and there need be none; otherwise there is at least one, and nothing else. most: calls that there may be, None for
    any number. ends: the answer ends with the last of these.
    """

    grammar: str
    free: bool = True
    most: int | None = None
    ends: bool = False

    def __post_init__(self) -> None:
        arguments.text("structured_outputs.calls.grammar", self.grammar)
        for name in ("free", "ends"):
            arguments.flag(f"structured_outputs.calls.{name}", getattr(self, name))
        if self.most is not None:
            arguments.integer("structured_outputs.calls.most", self.most, 1, _LARGEST)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an answer must match: exactly one of the first five, or what its calls must match, `calls`.

    json: a JSON schema, as a dict or its text. regex: a regular expression in the syntax of Rust's regex crate, for the
    whole text. choice: the texts to choose from. grammar: a context-free grammar in Lark's or in GBNF syntax.
    json_object: true for any JSON object. whitespace_pattern: a regular expression for the white space between the
    tokens of JSON, with json and json_object.

    Raises:
        UsageError: none or several are given, or one has a wrong type. What they say is checked by the compiler
            (`flint_runtime.structured`).
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    calls: CallParams | None = None

    def __post_init__(self) -> None:
        kinds = [f.name for f in fields(self) if f.name != "whitespace_pattern" and getattr(self, f.name) is not None]
        if len(kinds) != 1:
            raise UsageError(
                "structured_outputs needs exactly one of json, regex, choice, grammar and json_object, found "
                f"{' and '.join(kinds) or 'none'}."
            )
        (kind,), name = kinds, f"structured_outputs.{kinds[0]}"
        value = getattr(self, kind)
        if kind == "choice":
            if isinstance(value, str) or not isinstance(value, Sequence) or not value:
                raise UsageError(f"{name} must be a list of texts, found {shown(value)}.")
            if "" in value:
                raise UsageError(f"{name} must have no empty text, found {shown(value)}.")
            object.__setattr__(self, "choice", tuple(arguments.text(name, text) for text in value))
        elif kind == "json_object":
            if not arguments.flag(name, value):
                raise UsageError(f"{name} must be true or left out, found {shown(value)}.")
        elif kind == "calls":
            if not isinstance(value, CallParams):
                raise UsageError(f"{name} must be CallParams, found {shown(value)}.")
        elif kind != "json" or not isinstance(value, Mapping):
            arguments.text(name, value)
        if self.whitespace_pattern is not None:
            arguments.text("structured_outputs.whitespace_pattern", self.whitespace_pattern)
            if kind not in ("json", "json_object"):
                raise UsageError(f"structured_outputs.whitespace_pattern is for json and json_object, found {kind}.")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. None means: the checkpoint's default (`with_defaults`).

    temperature 0 is greedy; top_k 0 or -1 and top_p 1 are off. Without a seed, or with -1, every run differs. n answers
    are drawn with seed, seed + 1, …. logit_bias, -100 to 100 by token id, is added to the logits before anything else.
    allowed_token_ids: only these are drawn. bad_words: texts of which the last token is not drawn where it would
    complete them, as they are written or behind a space; a text can also be spelled by other tokens.

    Without max_tokens, or with more than the context has, a request runs to the end of the context. An answer ends at
    an end-of-sequence token (unless ignore_eos), at any of stop_token_ids, and where its text, behind the thinking
    part, has one of the texts `stop`, at most 16 of 1,000 characters: none of them before min_tokens. The text has
    neither the stop nor the stop token (unless include_stop_str_in_output), and special tokens not at all (unless
    skip_special_tokens is false). Without detokenize there is no text.

    logprobs: how many of the likeliest tokens to report at every token, at most 20, besides the token itself;
    prompt_logprobs: the same for every token of the prompt. logprob_token_ids: report these tokens instead of the
    likeliest. They are of the model's own distribution.

    thinking_token_budget: tokens of the thinking part after which </think> is forced, 0 for no thinking; nothing where
    the prompt opens no thinking part. priority: whoever has a lower one gets a place first, and keeps it when memory
    runs out; those of the same one in order of arrival. cache_salt: cached prefixes are shared only among requests of
    the same one, so that nobody else can tell from the time to the first token what was asked before.

    Raises:
        UsageError: a value is of a wrong type or out of its range. Whether the vocabulary has the token ids is checked
            when a request is made.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        # The device divides by it: smaller ones are 0 there.
        self._number("repetition_penalty", arguments.SMALLEST_FLOAT32, math.inf)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("top_k", -1, _LARGEST)
        self._integer("seed", -(2**63), 2**64 - 1)
        self._integer("n", 1, _MOST_CHOICES)
        self._integer("max_tokens", 1, _LARGEST)
        self._integer("min_tokens", 0, _LARGEST)
        self._integer("thinking_token_budget", 0, _LARGEST)
        self._integer("priority", -(2**63), 2**63 - 1)
        if self.cache_salt is not None and not arguments.text("cache_salt", self.cache_salt):
            raise UsageError("cache_salt must be a text that is not empty, or be left out.")
        given = arguments.token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        self._set("logprob_token_ids", given or None)
        self._integer("logprobs", 0, len(given) or MAX_LOGPROBS)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            self._set(name, arguments.flag(name, getattr(self, name)))
        self._instance("structured_outputs", StructuredOutputsParams, optional=True)
        self._instance("output_kind", RequestOutputKind)
        self._set("stop", arguments.texts("stop", self.stop, most=_MOST_STOPS, longest=_LONGEST_STOP))
        self._set("stop_token_ids", arguments.token_ids("stop_token_ids", self.stop_token_ids))
        self._set(
            "bad_words",
            arguments.texts("bad_words", self.bad_words, most=MAX_BAD_WORDS, longest=_LONGEST_BAD_WORD),
        )
        self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", arguments.token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.seed == -1:
            self._set("seed", None)
        self._check_together()

    def _check_together(self) -> None:
        """What the values must be beside each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens must be at most max_tokens ({self.max_tokens}), found {self.min_tokens}.")
        if self.n > 1 and self.temperature == 0:
            raise UsageError(f"n must be 1 at temperature 0, where all answers are the same; found {self.n}.")
        if self.allowed_token_ids == ():
            raise UsageError("allowed_token_ids must have a token id, found none. Leave it out to allow every token.")
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise UsageError(
                "logprobs must be left out beside logprob_token_ids, or be their number, "
                f"{len(self.logprob_token_ids)}; found {self.logprobs}."
            )
        if self.stop and not self.detokenize:
            raise UsageError("stop needs detokenize, since it is looked for in the text. Use stop_token_ids without.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _is_unset(self, name: str) -> bool:
        """Whether a value is None, where that is the default."""
        return getattr(self, name) is None and type(self).__dataclass_fields__[name].default is None

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        if not self._is_unset(name):
            self._set(name, arguments.number(name, getattr(self, name), low, high, open_low=open_low))

    def _integer(self, name: str, low: int, high: int) -> None:
        if not self._is_unset(name):
            self._set(name, arguments.integer(name, getattr(self, name), low, high))

    def _instance(self, name: str, kind: type, optional: bool = False) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind) and not (optional and value is None):
            raise UsageError(f"{name} must be {kind.__name__}, found {shown(value)}.")

    @staticmethod
    def from_optional(**values: Any) -> SamplingParams:
        """Parameters of which any may be None, which is its default."""
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """The same; nothing can change it. `dataclasses.replace` makes another."""
        return self

    def with_defaults(
        self, defaults: Mapping[str, float | int], draw_seed: Callable[[], int] | None = None
    ) -> SamplingParams:
        """Fill what is None from the checkpoint's defaults (`generation_defaults`), and the seed.

        Args:
            draw_seed: gives a seed of 64 bits where there is none; None for the system's random numbers.
        """
        every: dict[str, Any] = {**_NEUTRAL, **FLINT_DEFAULTS, **defaults}
        found = {name: every[name] for name in every if getattr(self, name) is None}
        if self.seed is None:
            found["seed"] = draw_seed() if draw_seed else secrets.randbits(64)
        return replace(self, **found)

    def choice(self, index: int) -> SamplingParams:
        """The parameters of one of the n answers; only after `with_defaults`. The first alone reports the prompt."""
        seed = ((self.seed or 0) + index) & _SEED_BITS
        return replace(self, n=1, seed=seed, prompt_logprobs=None if index else self.prompt_logprobs)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the logprobs of the answer are reported."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def is_masked(self) -> bool:
        """Whether some tokens must not be drawn."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words)

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
            use_mask=self.is_masked,
        )


_ROW_FIELDS = tuple(RowSampling.__annotations__.keys() & SamplingParams.__annotations__.keys() - {"seed"})


def _biases(bias: object) -> dict[int, float]:
    """logit_bias with integer keys: JSON has only texts. None, as JSON's null, is none."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, found {shown(bias)}.")
    found = {}
    for key, value in bias.items():
        is_decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        (token,) = arguments.token_ids("logit_bias", [int(key) if is_decimal else key])
        found[token] = arguments.number(f"logit_bias of token {token}", value, -100.0, 100.0)
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
