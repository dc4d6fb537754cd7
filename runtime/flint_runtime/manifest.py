"""engine.json: the contract that the builder writes and the runtime reads.

It carries a digest of itself, and the size and hash of every other file. That protects against damage and against
edits by hand, which no longer fit the graph, the plans and the tables. It is no signature: who wants to forge an engine
can write the digest, too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.config import ModelConfig

FORMAT_VERSION = 3
"""Of engines that this version writes and reads. From format 3 on engine.json has a digest."""
MANIFEST_NAME = "engine.json"
LIBRARY_NAME = "libflint_plugins.so"
ASSET_NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files of the checkpoint that an engine carries; all but the first where the checkpoint has them."""
DIGEST_FIELD = "blake3"

MAX_BATCH = 1024
MAX_PREFILL_CHUNK = 65536
MAX_CONTEXT = 1 << 24
"""Tokens. Far above any model's; it keeps what is computed from a damaged or forged number small."""

Backend = Literal["tensorrt", "tensorrt-rtx", "plugin-host"]
WeightFormat = Literal["nvfp4", "bf16"]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

LOW_LATENCY_TOKENS = 8
"""Most tokens of one sequence in a decode step (the token itself and proposed ones)."""
RING_GRANULE = 16


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Limits(_Part):
    """What the engine was built for. Lengths are in tokens."""

    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH)]
    """Sequences of one step."""
    max_context: Annotated[int, Field(ge=1, le=MAX_CONTEXT)]
    prefill_chunk: Annotated[int, Field(ge=1, le=MAX_PREFILL_CHUNK)]
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

    path: Annotated[str, Field(max_length=1024)]
    """Relative to the directory and inside of it, with forward slashes."""
    size: Annotated[int, Field(ge=0, lt=1 << 63)]
    """Bytes."""
    blake3: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError(f"{path!r:.200} is no path inside the engine")
        if path == MANIFEST_NAME:
            raise ValueError("the manifest cannot list itself")
        return path


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

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        times = Counter(entry.path for entry in self.files)
        if len(times) < len(self.files):
            raise ValueError(f"files lists {times.most_common(1)[0][0]} more than once")
        longest = self.model.max_position_embeddings
        if self.limits.max_context > longest:
            raise ValueError(f"limits.max_context is {self.limits.max_context}, the model's positions end at {longest}")
        return self


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of engine.json: the manifest and its digest."""
    document = manifest.model_dump(mode="json")
    return json.dumps({**document, DIGEST_FIELD: manifest_digest(document)}, indent=1, allow_nan=False).encode()


def manifest_digest(document: Mapping[str, Any]) -> str:
    """BLAKE3 of a parsed engine.json without its digest: of its JSON in UTF-8, keys sorted, without spaces.

    Raises:
        ValueError: a text is none that UTF-8 can write.
    """
    plain = {name: value for name, value in document.items() if name != DIGEST_FIELD}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return blake3(text.encode()).hexdigest()
