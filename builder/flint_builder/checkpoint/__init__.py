"""Checkpoint readers: NVFP4 in a GGUF file, BF16 in safetensors files."""

from flint_builder.checkpoint.base import Checkpoint
from flint_builder.checkpoint.open import WeightsChoice, open_checkpoint

__all__ = ["Checkpoint", "WeightsChoice", "open_checkpoint"]
