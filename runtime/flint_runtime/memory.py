"""How much GPU memory an engine takes, and the longest context that fits."""

from __future__ import annotations

from dataclasses import dataclass

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.config import ModelConfig
from flint_runtime.executors.step import sampling_states
from flint_runtime.manifest import Limits, ring_tokens

MAX_ELEMENTS = 2**31 - 1
"""Of one tensor: TensorRT counts them in 32 bits, and the kernels may, too."""

_BF16_BYTES = 2
_SPLITS, _MOST_SPLITS = 768, 128
"""Splits of a prefill step's keys: blocks in all, and of a query."""
_RESERVED_BYTES = 600 << 20
"""CUDA context, modules and allocator slack."""


@dataclass(frozen=True)
class Gpu:
    """A card that people run Flint on."""

    name: str
    architecture: str
    memory_bytes: int


def _gib(count: int) -> int:
    return count << 30


# Total memory as the driver reports it, rounded down to GiB.
KNOWN_GPUS = (
    Gpu("H100 80GB", "sm90", _gib(79)),
    Gpu("H200", "sm90", _gib(139)),
    Gpu("B200", "sm100", _gib(178)),
    Gpu("GB200", "sm100", _gib(184)),
    Gpu("RTX 5080", "sm120", _gib(15)),
    Gpu("RTX 5090", "sm120", _gib(31)),
    Gpu("RTX PRO 6000", "sm120", _gib(95)),
    Gpu("GB10", "sm121", _gib(119)),
)


@dataclass(frozen=True)
class MemoryPlan:
    """GPU memory of an engine, by component, in bytes."""

    config: ModelConfig
    weight_bytes: int
    limits: Limits

    @property
    def page_bytes(self) -> int:
        """One page of the global pool over all full layers."""
        return len(self.config.full_layers) * self._kv_elements(PAGE_TOKENS) * _BF16_BYTES

    @property
    def slot_bytes(self) -> int:
        """One sequence's sliding state over all sliding layers."""
        return len(self.config.sliding_layers) * self._kv_elements(self._ring) * _BF16_BYTES

    @property
    def most_pages(self) -> int:
        """Pages that a pool may have, however much memory there is."""
        return MAX_ELEMENTS // self._kv_elements(PAGE_TOKENS)

    @property
    def most_slots(self) -> int:
        """Ring slots that a pool may have."""
        return MAX_ELEMENTS // self._kv_elements(self._ring)

    @property
    def most_sample_slots(self) -> int:
        """Sample slots that the sampling states may have."""
        return MAX_ELEMENTS // self.config.vocab_size

    @property
    def _ring(self) -> int:
        return ring_tokens(self.config.sliding_window)

    def _kv_elements(self, tokens: int) -> int:
        """K and V of so many tokens in one layer."""
        return self.config.num_key_value_heads * 2 * tokens * self.config.head_dim

    @property
    def sample_slot_bytes(self) -> int:
        """One sequence's sampling states."""
        return sum(state.row_bytes for state in sampling_states(self.config.vocab_size).values())

    @property
    def workspace_bytes(self) -> int:
        """Activations and scratch of the node of the largest prefill step that needs most, an estimate.

        A layer's nodes have delta and residual in and out. NormQkvRope holds normed rows, the raw projection and q;
        NormMlp normed rows and activations; NormMoe normed rows, the shared expert's activations and output, logits
        and, per chosen expert, an activation and an output. SinkAttention has partial results, for at most so many
        splits of 16 rows as its kernels make (`attention.h`). The LM head has its inputs and the FP32 logits.
        """
        c, limits = self.config, self.limits
        hidden, chosen, kv_heads = c.hidden_size, c.num_experts_per_tok, c.num_key_value_heads
        qkv = hidden + 2 * (c.num_attention_heads + kv_heads) * c.head_dim
        mlp = hidden + c.intermediate_size
        moe = 2 * hidden + c.shared_expert_intermediate_size + chosen * (c.moe_intermediate_size + hidden)
        layer = 4 * hidden + max(qkv, mlp, moe + 2 * c.num_experts)
        heads, chunk = c.num_attention_heads, limits.prefill_chunk
        results = min(_SPLITS * 16 * heads // kv_heads, chunk * heads * _MOST_SPLITS)
        attention = 2 * (hidden + heads * c.head_dim) * chunk * _BF16_BYTES + results * (c.head_dim + 2) * 4
        head = 2 * hidden * chunk * _BF16_BYTES + limits.logits_rows * c.vocab_size * 4
        return max(layer * chunk * _BF16_BYTES, attention, head)

    @property
    def sampling_bytes(self) -> int:
        """Sampling states of as many sequences as a step takes."""
        return self.limits.max_batch * self.sample_slot_bytes

    def kv_bytes(self, context: int, sequences: int = 1) -> int:
        """KV memory of `sequences` sequences of `context` tokens each."""
        pages = -(-context // PAGE_TOKENS)
        return sequences * (pages * self.page_bytes + self.slot_bytes)

    def total_bytes(self, context: int, sequences: int = 1) -> int:
        """Everything, for `sequences` sequences of `context` tokens each."""
        return sum(self.components(context, sequences).values())

    def largest_context(self, memory_bytes: int, sequences: int = 1) -> int:
        """Longest context in tokens, at most the engine's, that fits `memory_bytes`; 0 where not even one page does."""
        free = memory_bytes - self.total_bytes(0, sequences)
        if free < 0:
            return 0
        if not self.page_bytes:
            return self.limits.max_context
        return min(self.limits.max_context, free // (sequences * self.page_bytes) * PAGE_TOKENS)

    def components(self, context: int, sequences: int = 1) -> dict[str, int]:
        """Component -> bytes."""
        pages = -(-context // PAGE_TOKENS)
        return {
            "weights": self.weight_bytes,
            "KV cache, full layers": sequences * pages * self.page_bytes,
            "KV cache, sliding layers": sequences * self.slot_bytes,
            "sampling states": self.sampling_bytes,
            "workspace (estimate)": self.workspace_bytes,
            "CUDA context (estimate)": _RESERVED_BYTES,
        }
