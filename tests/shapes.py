"""Model shapes that tests share."""

from __future__ import annotations

from pathlib import Path

from flint_runtime.config import ModelConfig

NANO_DIRECTORY = Path(__file__).parent / "data" / "flint-nano"
NANO = ModelConfig.from_file(NANO_DIRECTORY / "config.json")
"""The shape of tests/data/flint-nano."""

FLINT = ModelConfig.from_hf(
    {
        "model_type": "flint",
        "vocab_size": 150144,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 513,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
    },
    "the released model",
)
"""The released model."""
