"""The interface that every executor has: open an engine, allocate its states, run steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flint_runtime.config import ModelConfig
from flint_runtime.engine import Engine
from flint_runtime.executors.step import Float32, Int32, Pools, Step
from flint_runtime.manifest import Limits, Phase

__all__ = ["NO_TOKEN", "PROMPT_FLAG", "Executor", "Pools", "Step", "StepResult"]

PROMPT_FLAG = 1 << 30
"""Added to a token's count where the token stands in the prompt."""
NO_TOKEN = -1
"""Drawn where a row's logits are not finite, or its bias and mask forbid every token."""


@dataclass(frozen=True)
class StepResult:
    """What a step returns, per row of logits_rows.

    tokens [R] int32 (or NO_TOKEN), their logprobs [R] float32, the 20 likeliest tokens
    top_tokens [R, 20] int32 with top_logprobs [R, 20] float32, best first. logits [R, V] float32 only if asked for.
    """

    tokens: Int32
    logprobs: Float32
    top_tokens: Int32
    top_logprobs: Float32
    logits: Float32 | None = None


class Executor(ABC):
    """Runs steps of one engine. Not thread-safe."""

    engine: Engine

    @classmethod
    @abstractmethod
    def open(cls, directory: Path) -> Executor:
        """Open an engine directory and load its weights.

        Raises:
            EngineError: the directory is damaged, or this executor cannot run the engine here.
        """

    @abstractmethod
    def allocate(self, pages: int, slots: int, sample_slots: int) -> None:
        """Allocate the states, dropping earlier ones. The content of KV pools is undefined; sampling states
        start as `sampling_states` says.

        Args:
            pages: of 64 tokens, in every full layer.
            slots: rings in every sliding layer; sequences that can be alive at once.
            sample_slots: rows of the sampling states.
        Raises:
            ResourceError: not enough memory.
        """

    @property
    @abstractmethod
    def pools(self) -> Pools:
        """Sizes that were allocated."""

    @abstractmethod
    def begin_sequence(self, sample_slot: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Set a row of token_counts: the tokens a sequence's penalties start from."""

    @abstractmethod
    def run(self, phase: Phase, step: Step, *, logits: bool = False) -> StepResult:
        """Run one step; KV pools, token_counts and last_tokens are updated in place.

        Args:
            logits: whether to return the logits, too.
        Raises:
            StepError: the step is malformed or exceeds the engine's limits.
        """

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.engine.manifest.model

    @property
    def limits(self) -> Limits:
        """What the engine was built for."""
        return self.engine.manifest.limits
