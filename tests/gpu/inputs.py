"""Random inputs of ops and steps, made on any device: packed weights, activations, a whole node's inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flint_plugins.ops import FieldValue

FORMATS = ("nvfp4", "bf16")
EPS = 1e-6
TOP_K = 6
HEAD_DIM = 128
ROPE_THETA = 10_000.0
Device = torch.device | str


def random_packed(fmt: str, lead: tuple[int, ...], rows: int, columns: int, device: Device = "cpu") -> Tensor:
    """A random packed weight; its products with x (NVFP4: times `random_scale`) have about the variance of x.

    NVFP4 codes are any bytes, and block scales E4M3 from 0.5 to 2; both stand where `flint_plugins.layout` says.
    """
    if fmt == "nvfp4":
        packed = torch.randint(0, 256, (*lead, rows // 16, 9 * columns), dtype=torch.uint8, device=device)
        packed[..., 8 * columns :] = packed[..., 8 * columns :] % 17 + 0x30
        return packed.view(torch.int8)
    values = torch.randn(*lead, rows // 16, 16 * columns, dtype=torch.bfloat16, device=device)
    return values.mul_(columns**-0.5)


def random_scale(shape: tuple[int, ...], columns: int, device: Device = "cpu") -> Tensor:
    """Tensor scales, all different; values of a random NVFP4 weight have a root mean square of about 3.5."""
    return torch.empty(shape, device=device).uniform_(0.5, 1.0) / (2.6 * math.sqrt(columns))


def packed(
    name: str, fmt: str, rows: int, columns: int, scale: tuple[int, ...], device: Device, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """The bindings of one packed weight."""
    tensors = {name: random_packed(fmt, lead, rows, columns, device)}
    if fmt == "nvfp4":
        tensors[f"{name}_scale"] = random_scale((*lead, *scale), columns, device)
    return tensors


def normal(*shape: int, device: Device = "cpu") -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def stream(tokens: int, hidden: int, device: Device = "cpu") -> dict[str, Tensor]:
    """The residual stream in front of a norm, and its weight."""
    return {
        "delta": normal(tokens, hidden, device=device),
        "residual": normal(tokens, hidden, device=device),
        "norm": torch.empty(hidden, device=device).uniform_(0.5, 1.5),
    }


def rope_table(length: int, device: Device = "cpu") -> Tensor:
    """[length, 128] f32: cosines, then sines."""
    half = HEAD_DIM // 2
    rates = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def node_weights(op: str, fmt: str, shape: Mapping[str, int], rows: int, device: Device = "cpu") -> dict[str, Tensor]:
    """The weights of a node; see `node_inputs`."""
    hidden = shape["hidden"]
    if op == "Linear":
        return packed("weight", fmt, hidden, shape["heads"] * HEAD_DIM, (1,), device)
    if op == "LmHead":
        return packed("weight", fmt, 16 * rows, hidden, (1,), device)
    if op == "NormMlp":
        size = shape["dense"]
        up = packed("gate_up", fmt, 2 * size, hidden, (2,), device)
        return up | packed("down", fmt, hidden, size, (1,), device)
    if op == "NormQkvRope":
        count = (shape["heads"] + 2 * shape["kv_heads"]) * HEAD_DIM
        norms = {name: torch.empty(HEAD_DIM, device=device).uniform_(0.5, 1.5) for name in ("q_norm", "k_norm")}
        return packed("qkv", fmt, count, hidden, (3,), device) | norms
    assert op == "NormMoe", op
    experts, size, shared = (shape[name] for name in ("experts", "moe", "shared"))
    return {
        "router": torch.randn(experts, hidden, device=device) / math.sqrt(hidden),
        **packed("experts_gate_up", fmt, 2 * size, hidden, (2,), device, (experts,)),
        **packed("experts_down", fmt, hidden, size, (), device, (experts,)),
        **packed("shared_gate_up", fmt, 2 * shared, hidden, (2,), device),
        **packed("shared_down", fmt, hidden, shared, (1,), device),
    }


def node_inputs(
    op: str,
    fmt: str,
    shape: Mapping[str, int],
    tokens: int,
    rows: int,
    device: Device = "cpu",
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, FieldValue], dict[str, Tensor]]:
    """Fields and inputs of a node with weights (NormQkvRope: a sliding layer's prefill, which writes no pool).

    Args:
        shape: hidden, heads, kv_heads, dense, moe, shared, experts.
        rows: of LmHead: panels of 16 rows of its weight, and rows of logits.
        weights: of `node_weights`, to use again.
    """
    fields: dict[str, FieldValue] = {"weights": fmt}
    inputs = dict(node_weights(op, fmt, shape, rows, device) if weights is None else weights)
    if op == "Linear":
        return fields, inputs | {"x": normal(tokens, shape["heads"] * HEAD_DIM, device=device)}
    fields["eps"] = EPS
    inputs |= stream(tokens, shape["hidden"], device)
    if op == "NormMoe":
        fields["top_k"] = TOP_K
    elif op == "LmHead":
        inputs["logits_rows"] = torch.randint(0, tokens, (rows,), dtype=torch.int32, device=device)
    elif op == "NormQkvRope":
        fields |= {
            "has_residual": 1, "attention": "sliding", "phase": "prefill",
            "num_heads": shape["heads"], "num_kv_heads": shape["kv_heads"], "head_dim": HEAD_DIM,
        }  # fmt: skip
        inputs["positions"] = torch.arange(tokens, dtype=torch.int32, device=device) + 1000
        inputs["rope"] = rope_table(tokens + 1000, device)
    return fields, inputs
