"""SamplingParams: how a request wants its tokens drawn. Names and meanings are vLLM's."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flint_runtime.errors import EngineError, UsageError
from flint_runtime.executors.step import RowSampling

FLINT_DEFAULTS: dict[str, float | int] = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
"""What the released model recommends; a generation_config.json overrides it."""
_NEUTRAL: dict[str, float | int] = {"min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. None means: the checkpoint's default (`with_defaults`).

    temperature 0 is greedy; top_k 0 or -1 and top_p 1 are off. Without a seed every run differs. Without max_tokens a
    request runs to the end of the context. Generation ends at an end-of-sequence token (unless ignore_eos) and at any
    of stop_token_ids.

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
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, open_low=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("top_k", -1, 2**31 - 1)
        self._integer("seed", -(2**63), 2**64 - 1)
        self._integer("max_tokens", 1, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos must be true or false, found {self.ignore_eos!r}.")
        stop = tuple(self.stop_token_ids)
        if any(type(token) is not int or token < 0 for token in stop):
            raise UsageError(f"stop_token_ids must be token ids, found {list(stop)!r}.")
        object.__setattr__(self, "stop_token_ids", stop)

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            ending = f"to {high:g}" if high < math.inf else "on"
            start = f"above {low:g} and up" if open_low else f"from {low:g}"
            raise UsageError(f"{name} must be a number {start} {ending}, found {value!r}.")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise UsageError(f"{name} must be a whole number from {low} to {high}, found {value!r}.")

    def with_defaults(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Fill what is None from the checkpoint's defaults (`generation_defaults`); draw a seed where there is none."""
        every: dict[str, Any] = {**_NEUTRAL, **FLINT_DEFAULTS, **defaults, "seed": secrets.randbits(64)}
        return replace(self, **{n: every[n] for n in every if getattr(self, n) is None})

    def row(self, draw_index: int, sample_slot: int) -> RowSampling:
        """What the executor needs to draw the `draw_index`-th token; only after `with_defaults`."""
        seed = (self.seed or 0) & (2**64 - 1)
        shared = set(RowSampling._fields) & {f.name for f in fields(self)} - {"seed"}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        assert None not in values.values(), "with_defaults was not called"
        return RowSampling(
            **values, seed=(seed & 0xFFFFFFFF, seed >> 32), draw_index=draw_index, sample_slot=sample_slot
        )


def generation_defaults(path: Path) -> tuple[dict[str, float | int], tuple[int, ...]]:
    """Read a generation_config.json: sampling defaults, and the end-of-sequence ids.

    A checkpoint with do_sample false is greedy by default. A missing file gives no defaults and no ids.

    Raises:
        EngineError: the file is not a generation config.
    """
    try:
        raw = json.loads(path.read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"it holds {type(raw).__name__}, expected an object")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        defaults = {name: raw[name] for name in names if raw.get(name) is not None}
        if raw.get("do_sample") is False:
            defaults["temperature"] = 0.0
        SamplingParams(**defaults)
        eos = raw.get("eos_token_id")
        ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        SamplingParams(stop_token_ids=ids)
    except FileNotFoundError:
        return {}, ()
    except (OSError, ValueError, UsageError) as error:
        raise EngineError(f"{path} is not a generation config: {error}") from None
    return defaults, ids
