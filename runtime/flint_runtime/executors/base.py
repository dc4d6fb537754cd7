"""The interface that every executor has: open an engine, allocate its states, submit steps, read their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flint_runtime.config import ModelConfig
from flint_runtime.engine import Engine
from flint_runtime.executors.step import Float32, Int32, Pools, Step, StepError
from flint_runtime.manifest import Limits, Phase

__all__ = [
    "MAX_IN_FLIGHT",
    "NO_TOKEN",
    "PROMPT_FLAG",
    "Executor",
    "Pending",
    "Pools",
    "Step",
    "StepError",
    "StepResult",
]

MAX_IN_FLIGHT = 2
"""Steps whose results may be unread at once: one runs while the host prepares the next."""
PROMPT_FLAG = 1 << 30
"""Added to a token's count where the token stands in the prompt."""
NO_TOKEN = -1
"""Drawn where a row's logits are not finite, or its bias and mask forbid every token."""


@dataclass(frozen=True)
class StepResult:
    """What a step returns, per row of logits_rows.

    tokens [R] int32 (or NO_TOKEN), their logprobs [R] float32, the 20 likeliest tokens
    top_tokens [R, 20] int32 with top_logprobs [R, 20] float32, best first. logits float32 only if asked for: [R, V], or
    [rows asked for, V].
    """

    tokens: Int32
    logprobs: Float32
    top_tokens: Int32
    top_logprobs: Float32
    logits: Float32 | None = None


class Pending(ABC):
    """A step that was submitted."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would not wait."""

    @abstractmethod
    def result(self) -> StepResult:
        """Wait for the step, and for no later one. Further calls return, or raise, the same.

        Raises:
            FlintError: what went wrong while it ran.
        """


class Executor(ABC):
    """Runs steps of one engine, in the order submitted. Not thread-safe.

    Whatever changes states (begin_sequence, set_logit_bias, set_token_mask, copy_slots) takes its turn among the
    steps: behind those submitted before, ahead of those submitted after. None of it waits for the device.
    """

    engine: Engine

    @classmethod
    @abstractmethod
    def open(cls, directory: Path) -> Executor:
        """Open an engine directory and load its weights.

        Raises:
            EngineError: the directory is damaged, or this executor cannot run the engine here.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything, results not read yet among it; the executor is of no use afterwards."""

    # --- States -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """Allocate the states, dropping earlier ones, once every submitted step has run.

        The content of KV pools is undefined; the sampling states start as `sampling_states` says.

        Args:
            pages: of 64 tokens, in every full layer.
            slots: rings in every sliding layer: of sequences that are alive, and snapshots of such.
            sample_slots: rows of the sampling states; sequences that can be alive at once.
        Raises:
            ResourceError: not enough memory.
        """

    @property
    @abstractmethod
    def pools(self) -> Pools:
        """Sizes that were allocated."""

    @abstractmethod
    def memory_available(self) -> int | None:
        """Bytes that `allocate` may take; None where nobody knows."""

    @abstractmethod
    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Give a sample slot to a sequence: no bias, no mask, and the tokens that its penalties start from.

        A sequence without penalties may leave out its tokens; that costs less.

        Raises:
            StepError: there is no such slot or token.
        """

    @abstractmethod
    def set_logit_bias(self, sample_slot: int, bias: Mapping[int, float]) -> None:
        """Replace what a slot's rows with use_bias add to their logits; no tokens: nothing.

        Raises:
            StepError: there is no such slot or token.
        """

    @abstractmethod
    def set_token_mask(self, sample_slot: int, mask: npt.NDArray[np.int32 | np.uint32]) -> None:
        """Replace the tokens that a slot's rows with use_mask may draw.

        Args:
            mask: [V/32]; bit v % 32 of word v / 32 allows token v.
        Raises:
            StepError: there is no such slot, or the mask has another shape or type.
        """

    @abstractmethod
    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the state of ring slots, in all sliding layers, pair by pair.

        Raises:
            StepError: there is no such slot, or the lists differ in length.
        """

    # --- Steps --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, phase: Phase, step: Step, *, logits: bool | Sequence[int] = False) -> Pending:
        """Queue one step, which updates the states in place, and return at once.

        Args:
            logits: which rows of the logits to return, too, in rising order, or all; a copy of [V] float32 for each.
        Raises:
            StepError: the step is malformed or exceeds the engine's limits, or MAX_IN_FLIGHT results are unread.
        """

    @abstractmethod
    def discard(self) -> None:
        """Wait for every submitted step and drop the results that nobody has read; no `Pending` is of use any more.

        Raises:
            FlintError: the device does not work any more.
        """

    def run(self, phase: Phase, step: Step, *, logits: bool | Sequence[int] = False) -> StepResult:
        """Submit one step and wait for its result; raises what both do."""
        return self.submit(phase, step, logits=logits).result()

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.engine.manifest.model

    @property
    def limits(self) -> Limits:
        """What the engine was built for."""
        return self.engine.manifest.limits


def too_many_in_flight() -> StepError:
    """MAX_IN_FLIGHT results are unread."""
    return StepError(f"{MAX_IN_FLIGHT} steps are unread, and no more may be; read a result before the next step")
