"""The oracle: transformers' FlintForCausalLM on the CPU over a checkpoint of either format, and the tolerance rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import FlintConfig, FlintForCausalLM

from tests.tools.checkpoints import read_gguf

Logits = npt.NDArray[np.float32]
State = dict[str, torch.Tensor]
"""Weights by transformers' internal names, float32."""


def read_state(checkpoint: Path) -> State:
    """Read a BF16 directory or an NVFP4 file (e2m1 * e4m3 * tensor_scale, rounded to float32)."""
    state, experts = {}, defaultdict[str, dict[int, torch.Tensor]](dict)
    for name, tensor in _tensors(checkpoint):
        if ".experts." in name:
            base, _, rest = name.partition(".experts.")
            index, part, _ = rest.split(".")
            experts[f"{base}.experts.{part}"][int(index)] = tensor
        else:
            state[name.replace("softmax_offset", "sinks")] = tensor
    stacked = {name: torch.stack([parts[e] for e in range(len(parts))]) for name, parts in experts.items()}
    for name, gate in stacked.items():
        if name.endswith("gate_proj"):
            up = stacked[name.replace("gate_proj", "up_proj")]
            state[name.replace("gate_proj", "gate_up_proj")] = torch.cat([gate, up], dim=1)
        elif name.endswith("down_proj"):
            state[name] = stacked[name]
    return state


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if checkpoint.suffix == ".gguf":
        for name, values in read_gguf(checkpoint):
            yield name, torch.from_numpy(values.copy())
    else:
        for path in sorted(checkpoint.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                yield name, tensor.float()


def load(config_directory: Path, state: State, dtype: torch.dtype) -> FlintForCausalLM:
    """transformers' model in a dtype; router and sinks stay float32, as `from_pretrained` keeps them."""
    config = FlintConfig.from_pretrained(config_directory, attn_implementation="eager")
    with torch.device("meta"):
        model = FlintForCausalLM(config)
    kept = ("mlp.gate.weight", "sinks")
    model.load_state_dict({n: t if n.endswith(kept) else t.to(dtype) for n, t in state.items()}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    return model


@dataclass
class Expected:
    """transformers' logits of a prompt, and how far its BF16 run is from its FP32 run."""

    logits: Logits
    """[T, V], FP32 run."""
    bf16_error: Logits
    """[T, V], BF16 run minus FP32 run."""


def expect(config_directory: Path, state: State, prompts: list[list[int]]) -> list[Expected]:
    """Run transformers on prompts, each alone, in FP32 and in BF16."""
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(config_directory, state, dtype)
        with torch.inference_mode():
            runs.append([model(torch.tensor([p]), use_cache=False).logits[0].float().numpy() for p in prompts])
    return [Expected(exact, rounded - exact) for exact, rounded in zip(*runs, strict=True)]


@dataclass
class Parity:
    """How far logits are from transformers' FP32 run, beside what the rule allows."""

    error: float
    allowed: float
    rms: float
    allowed_rms: float
    wrong_argmax: int
    """Rows whose arg-max differs although the FP32 margin exceeds the BF16 run's error."""

    @property
    def holds(self) -> bool:
        """Whether the rule of the design's numerics holds."""
        return self.error <= self.allowed and self.rms <= self.allowed_rms and not self.wrong_argmax


def parity(found: Logits, expected: Expected, own_error: float, rows: slice = slice(None)) -> Parity:
    """Apply the rule of the design's numerics, to the largest error and to its root mean square.

    Args:
        found: logits of the prompt's `rows`.
        own_error: the largest error of transformers' BF16 run (`largest_error`), over all prompts that are tested on
            the model: the largest errors are those of tokens whose sixth and seventh expert are so close that rounding
            swaps them, and which tokens these are differs between any two ways of rounding.
    """
    error = found - expected.logits[rows]
    best = np.sort(expected.logits[rows], axis=-1)
    clear = best[:, -1] - best[:, -2] > own_error
    wrong = clear & (found.argmax(-1) != expected.logits[rows].argmax(-1))
    rms, own_rms = (float(np.sqrt(np.mean(np.square(e)))) for e in (error, expected.bf16_error))
    return Parity(float(np.abs(error).max()), 2 * own_error, rms, 2 * own_rms, int(wrong.sum()))


def largest_error(expected: list[Expected]) -> float:
    """Largest error of transformers' BF16 run over some prompts."""
    return max(float(np.abs(e.bf16_error).max()) for e in expected)
