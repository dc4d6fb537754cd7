"""engine.json: the contract that the builder writes and the runtime reads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.config import ModelConfig

FORMAT_VERSION = 2
"""That the builder writes. From format 2 on decode graphs have NormQkvAttention for NormQkvRope and SinkAttention."""
READABLE_FORMATS = (1, FORMAT_VERSION)
MANIFEST_NAME = "engine.json"
LIBRARY_NAME = "libflint_plugins.so"

Backend = Literal["tensorrt", "tensorrt-rtx", "plugin-host"]
WeightFormat = Literal["nvfp4", "bf16"]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

LOW_LATENCY_TOKENS = 8
"""Most tokens of one sequence in a decode step (the token itself and proposed ones)."""
RING_GRANULE = 16


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Part):
    """What the engine was built for. Lengths are in tokens."""

    max_batch: int
    """Sequences of one step."""
    max_context: int
    prefill_chunk: int
    """Tokens of one prefill step, over all its sequences."""

    @property
    def decode_tokens(self) -> int:
        """Tokens of one decode step, over all its sequences."""
        return max(self.max_batch, LOW_LATENCY_TOKENS)

    @property
    def logits_rows(self) -> int:
        """Rows of logits that one prefill step may ask for; more are taken in several steps."""
        return max(self.max_batch, min(self.prefill_chunk, 512))


def ring_tokens(sliding_window: int) -> int:
    """Tokens of one sliding slot: the window, a page and what one decode step writes, rounded up.

    With the page a sequence that comes to its end has still the state at its last page boundary, to be used again.
    """
    tokens = sliding_window + PAGE_TOKENS + LOW_LATENCY_TOKENS
    return -(-tokens // RING_GRANULE) * RING_GRANULE


class FileEntry(_Part):
    """One file of the engine directory."""

    path: str
    """Relative to the directory, with forward slashes."""
    size: int
    """Bytes."""
    sha256: str


class Manifest(_Part):
    """engine.json. `targets` are GPU architectures such as "sm120"; empty `backend_version` means no plan."""

    format_version: int
    generator: str
    """Program and version that wrote the engine."""
    model: ModelConfig
    weights: WeightFormat
    layout_version: int
    """Of the packed weights: `flint_plugins.layout.LAYOUT_VERSION`."""
    targets: tuple[str, ...]
    backend: Backend
    backend_version: str
    plugins_version: str
    limits: Limits
    notes: dict[str, int | str]
    """Facts about the build that a person may want: source, tensors without a scale, lenient scales."""
    files: tuple[FileEntry, ...]
