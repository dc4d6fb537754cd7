"""Flint in plain PyTorch on any device, from an engine's packed weights, by the rules of the design's numerics.

What the plugins are compared with where the reference executor is too slow: full widths, thousands of tokens, 49
layers. It shares no code with the reference ops (tests/runtime/test_torch_oracle.py compares the two on the CPU). Sums
are FP64, rounded to FP32 once: the value that every order of an FP32 sum approximates.

An op's result comes with an allowance per element, how far a correct kernel may be from it. It is built from what the
op really rounds and adds:

STEP  a value next to a rounding border goes to the other neighbour: one BF16 step, at most 2^-7 of the value.
SUM   the order of an FP32 sum. Tensor cores add some K / 8 groups, truncating to 2^-24 of the partial sum; terms of
      random sign keep that near q = sqrt(sum of squared terms). K is at most 6,144, and 768 * 2^-24 q < 2^-14 q.
NORM  the normalised input of a product. Its values seldom flip (an FP32 error of 2^-22 against steps of 2^-8: one in
      10^4), but one flip moves the sum by up to 2^-7 |x_k w_k|. A term is q / sqrt(K) in the mean, and less than 22
      times that (6 deviations of x, which the norm's weight widens, by 3.7 of w).
FLIPS the activation between two products. A flip of the norm moves every gate and up of its token, so some of them
      flip, and of the activations. With the largest value of every token flipped, errors have a deviation of 2^-8.3 q
      (tests/runtime/test_torch_oracle.py): FLIPS is five of them.
LOGITS attention where the projection is part of the op: q, and the step's own keys, may have flipped before. With a
      tenth of their elements a step off (a flipped norm does less), logits are off by 2^-7 * 10^-0.5 = 2^-8.7 in the
      mean, where q and k have unit variance; as each term is by P's rounding. LOGITS is six deviations of the sum.

These are for the worst of up to 10^7 values. In the root mean square a result agrees far better: ALL, but for the few
tokens whose norm flips (see `check`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flint_plugins.layout import E2M1_VALUES, E4M3_VALUES, PANEL_ROWS, TILE_COLUMNS
from flint_plugins.ops import FieldValue
from flint_runtime.config import ModelConfig

Fields = Mapping[str, FieldValue]
Tensors = Mapping[str, Tensor]

STEP, SUM, FLIPS = 2.0**-7, 2.0**-14, 2.0**-6
LOGITS = 2.0**-6
NORM_TERMS = 22
ALL = 2.0**-10
"""Of the values' root mean square. Flips are rare, so they stay below one rounding (2^-9); wrong factors do not."""
FLIPPED = 2.0**-7
"""The same for a single token whose norm flipped; 2^-8 was seen where the largest value did."""
ATTENTION_ALL = 2.0**-8
"""The same for attention, where every P is rounded, relative to one maximum or another."""
ROUTE_MARGIN = 1e-3
"""Logits of the router closer than this may be chosen in another order: a flip of a normalised value of 2 deviations
moves a logit by so much."""

_BLOCK_LOGITS = 1 << 28
"""Attention logits held at once: queries are taken in blocks."""


class Bounded(NamedTuple):
    """A result, and how far from it a correct kernel may be, element by element (FP32)."""

    value: Tensor
    allowed: Tensor


class Product(NamedTuple):
    """FP32 accumulators [T, N] of a product, times the tensor scale, and q = sqrt(sum of squared terms)."""

    value: Tensor
    size: Tensor


# --- Weights ----------------------------------------------------------------------------------------------------------


def unpack(packed: Tensor) -> Tensor:
    """A packed weight [..., N / 16, 9 K] int8 or [..., N / 16, 16 K] bf16 as bf16 [..., N, K], exact."""
    return _unpack_nvfp4(packed) if packed.dtype == torch.int8 else _unpack_bf16(packed)


def _unpack_nvfp4(packed: Tensor) -> Tensor:
    *lead, panels, size = packed.shape
    columns = size // 9
    tiles = columns // TILE_COLUMNS
    group = math.gcd(4, tiles)
    data = packed.view(torch.uint8)
    # [..., panel, tile, g, t, half, value] -> [..., panel, half, g, tile, t, value]; rows are (panel, half, g).
    codes = _codes(data[..., : 8 * columns]).view(-1, panels, tiles, 8, 4, 2, 16).permute(0, 1, 5, 3, 2, 4, 6)
    # [..., panel, group, g, t, tile of the group, half] -> [..., panel, half, g, tile, t]
    scales = data[..., 8 * columns :].reshape(-1, panels, tiles // group, 8, 4, group, 2).permute(0, 1, 6, 3, 2, 5, 4)
    values = _table(E2M1_VALUES, codes).flatten(4, 5)
    values = values.view(*values.shape[:4], -1, 16) * _table(E4M3_VALUES, scales).flatten(4).unsqueeze(-1)
    return values.reshape(*lead, panels * PANEL_ROWS, columns)


def _codes(data: Tensor) -> Tensor:
    """The E2M1 codes of bytes [..., 8 n] as [..., 16 n] in the order of their columns."""
    words = data.contiguous().view(torch.int16)
    # Where mantissa, exponent and sign of a half word's four codes lie; they are values 0, 8, 1 and 9 of its pair.
    places = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (14, 10, 11, 13))
    first, eighth, second, ninth = (
        torch.stack([(words >> place & 1) << bit for bit, place in enumerate(code)]).sum(0) for code in places
    )
    groups = [torch.stack(pair, dim=-1).unflatten(-2, (-1, 4)) for pair in ((first, second), (eighth, ninth))]
    return torch.stack(groups, dim=-3).flatten(-4)


def _table(values: npt.NDArray[np.float32], index: Tensor) -> Tensor:
    return torch.as_tensor(values).to(index.device, torch.bfloat16)[index.int()]


def _unpack_bf16(packed: Tensor) -> Tensor:
    *lead, panels, size = packed.shape
    tiles = size // PANEL_ROWS // TILE_COLUMNS
    # [..., panel, tile, i, g, t, pair, half, 2] -> [..., panel, half, g, tile, t, (i, pair, 2)]
    fragments = packed.reshape(-1, panels, tiles, 4, 8, 4, 2, 2, 2).permute(0, 1, 7, 4, 2, 5, 3, 6, 8).flatten(6)
    held = [first + pair for first in (0, 1, 4, 5) for pair in (0, 2, 8, 10)]
    place = torch.tensor([held.index(column) for column in range(16)], device=packed.device)
    return fragments[..., place].reshape(*lead, panels * PANEL_ROWS, tiles * TILE_COLUMNS)


def gate_and_up(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up [..., I, K] bf16 of an interleaved weight: 8 rows of each in turn."""
    matrix = unpack(packed)
    *lead, rows, columns = matrix.shape
    parts = matrix.view(*lead, rows // 16, 2, 8, columns)
    return parts[..., 0, :, :].reshape(*lead, -1, columns), parts[..., 1, :, :].reshape(*lead, -1, columns)


# --- Parts of ops -----------------------------------------------------------------------------------------------------


def product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Product:
    """x [T, K] bf16 times weight [N, K] bf16, transposed; `scale` one FP32 value, on the accumulator."""
    value = sums(x, weight)
    size = (x.float().square() @ weight.float().square().T).sqrt()
    return Product(value, size) if scale is None else Product(value * scale, size * scale.abs())


def sums(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 accumulators of x W^T. The tests put another order of sums in its place."""
    return (x.double() @ weight.double().T).float()


def norm_flip(columns: int) -> float:
    """What one flip of the norm moves a sum of K terms, of q."""
    return STEP * NORM_TERMS / math.sqrt(columns)


def rounded(found: Product, before: float) -> Bounded:
    """r(accumulator): one step, the sum's order, and `before`, what may have moved the inputs, of q."""
    value = found.value.bfloat16()
    return Bounded(value, STEP * value.float().abs() + (SUM + before) * found.size)


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """r(x * rsqrt(mean(x^2) + eps) * w): [..., H] f32 -> [..., H] bf16."""
    mean = x.double().square().mean(-1, keepdim=True).float()
    return (x * torch.rsqrt(mean + eps) * weight).bfloat16()


def add_norm(fields: Fields, t: Tensors) -> tuple[Tensor, Tensor]:
    """The norm of s = delta + residual, and r(s)."""
    total = t["delta"].float() + t["residual"].float() if "residual" in t else t["delta"].float()
    return normalize(total, t["norm"], float(fields["eps"])), total.bfloat16()


def activation(gate: Tensor, up: Tensor) -> Tensor:
    """r(g / (1 + exp(-g)) * u) in FP32."""
    gate, up = gate.float(), up.float()
    return (gate / (1 + torch.exp(-gate)) * up).bfloat16()


def dense(x: Tensor, t: Tensors, prefix: str) -> tuple[Bounded, Tensor]:
    """SwiGLU with gate and up rounded to BF16; also q of the second product."""
    gate_scale, up_scale = _pair(t.get(f"{prefix}gate_up_scale"))
    gate, up = gate_and_up(t[f"{prefix}gate_up"])
    act = activation(_scaled(x, gate, gate_scale).bfloat16(), _scaled(x, up, up_scale).bfloat16())
    down = product(act, unpack(t[f"{prefix}down"]), t.get(f"{prefix}down_scale"))
    return rounded(down, FLIPS), down.size


def _scaled(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    found = sums(x, weight)
    return found if scale is None else found * scale


def _pair(scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scales is None else (scales[..., 0], scales[..., 1])


# --- Ops --------------------------------------------------------------------------------------------------------------


def linear(fields: Fields, t: Tensors) -> dict[str, Bounded]:
    """y = r(sum(x w) * tensor_scale)."""
    return {"y": rounded(product(t["x"], unpack(t["weight"]), t.get("weight_scale")), 0)}


def norm_mlp(fields: Fields, t: Tensors) -> dict[str, Bounded]:
    """Residual add and norm, dense SwiGLU."""
    x, residual = add_norm(fields, t)
    return {"out": dense(x, t, "")[0], "residual_out": _exact(residual)}


def router_logits(fields: Fields, t: Tensors) -> Tensor:
    """FP32 logits [T, E] of a NormMoe node."""
    return sums(add_norm(fields, t)[0], t["router"])


def choose(logits: Tensor, top_k: int) -> Tensor:
    """The chosen experts [T, k], best first; ties go to the lowest index."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]


def clear_choice(logits: Tensor, top_k: int) -> Tensor:
    """Tokens [T] whose last chosen and first refused logits are further apart than ROUTE_MARGIN."""
    best = torch.topk(logits, top_k + 1, dim=-1).values
    return best[:, top_k - 1] - best[:, top_k] > ROUTE_MARGIN


def norm_moe(fields: Fields, t: Tensors, chosen: Tensor | None = None) -> dict[str, Bounded]:
    """Residual add and norm, router, experts, combine.

    Args:
        chosen: experts [T, k] to take instead of the router's choice; their weights follow from the logits as ever.
    """
    x, residual = add_norm(fields, t)
    logits = sums(x, t["router"])
    if chosen is None:
        chosen = choose(logits, int(fields["top_k"]))
    scores = 1 / (1 + torch.exp(-logits.gather(-1, chosen)))
    weights = scores / scores.sum(-1, keepdim=True)
    outputs, sizes = _experts(x, t, chosen)
    routed = torch.zeros(x.shape, device=x.device)
    for slot in range(chosen.shape[1]):
        routed += weights[:, slot, None] * outputs[:, slot].float()
    routed = routed.bfloat16()
    shared, shared_size = dense(x, t, "shared_")
    value = (routed.float() + shared.value.float()).bfloat16()
    # One step of each value that is rounded on the way, and the flips in front of the products.
    weighted = weights.unsqueeze(-1)
    steps = (weighted * outputs.float().abs()).sum(1) + routed.float().abs() + shared.value.float().abs()
    flips = ((weighted * sizes).square().sum(1) + shared_size.square()).sqrt()
    allowed = STEP * (steps + value.float().abs()) + (SUM + FLIPS) * flips
    return {"out": Bounded(value, allowed), "residual_out": _exact(residual)}


def _experts(x: Tensor, t: Tensors, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs y [T, k, H] bf16 of the chosen experts, and q of their second products, f32."""
    tokens, slots = chosen.shape
    outputs = torch.empty(tokens, slots, x.shape[-1], dtype=torch.bfloat16, device=x.device)
    sizes = torch.empty(outputs.shape, device=x.device)
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(t["router"])).tolist()
    gate_up_scale, down_scale = t.get("experts_gate_up_scale"), t.get("experts_down_scale")
    for expert, places in enumerate(torch.split(order, counts)):
        if not len(places):
            continue
        mine = x[places // slots]
        gate, up = gate_and_up(t["experts_gate_up"][expert])
        gate_scale, up_scale = _pair(None if gate_up_scale is None else gate_up_scale[expert])
        act = activation(_scaled(mine, gate, gate_scale), _scaled(mine, up, up_scale))
        scale = None if down_scale is None else down_scale[expert]
        found = product(act, unpack(t["experts_down"][expert]), scale)
        outputs.flatten(0, 1)[places] = found.value.bfloat16()
        sizes.flatten(0, 1)[places] = found.size
    return outputs, sizes


def lm_head(fields: Fields, t: Tensors) -> dict[str, Bounded]:
    """FP32 logits of the rows asked for."""
    rows = t["logits_rows"].long()
    x, _ = add_norm(fields, {**t, "delta": t["delta"][rows], "residual": t["residual"][rows]})
    found = product(x, unpack(t["weight"]), t.get("weight_scale"))
    return {"logits": Bounded(found.value, (SUM + norm_flip(x.shape[1])) * found.size)}


def norm_qkv_rope(fields: Fields, t: Tensors) -> dict[str, Bounded]:
    """q [T, Hq, D], k and v [T, Hkv, D] as the cache takes them, and residual_out (where there is a residual)."""
    heads, kv_heads, dim = (int(fields[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    x, residual = add_norm(fields, t)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    scales = [None] * 3 if "qkv_scale" not in t else list(t["qkv_scale"])
    outputs = {}
    for name, weight, scale in zip("qkv", torch.split(unpack(t["qkv"]), sizes), scales, strict=True):
        raw = rounded(product(x, weight, scale), norm_flip(x.shape[1]))
        outputs[name] = Bounded(*(part.view(len(x), -1, dim) for part in raw))
    for name in "qk":
        outputs[name] = _head_norm(outputs[name], t[f"{name}_norm"], float(fields["eps"]))
        if "rope" in t:
            outputs[name] = _rotate(outputs[name], t["rope"][t["positions"].long()])
    if "residual" in t:
        outputs["residual_out"] = _exact(residual)
    return outputs


def _head_norm(raw: Bounded, weight: Tensor, eps: float) -> Bounded:
    """The norm of each head; an error of raw grows with 1 / rms, and moves the rms by less than one step."""
    value = normalize(raw.value.float(), weight, eps)
    inverse = torch.rsqrt(raw.value.float().square().mean(-1, keepdim=True) + eps)
    return Bounded(value, raw.allowed * inverse * weight.abs() + 2 * STEP * value.float().abs())


def _rotate(x: Bounded, table: Tensor) -> Bounded:
    """RoPE (NeoX halves) in FP32, rounded to BF16: table [T, D] = cos, then sin."""
    cos, sin = (half.unsqueeze(1) for half in table.chunk(2, dim=-1))
    first, second = x.value.float().chunk(2, dim=-1)
    value = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).bfloat16()
    first, second = x.allowed.chunk(2, dim=-1)
    cos, sin = cos.abs(), sin.abs()
    moved = torch.cat([first * cos + second * sin, second * cos + first * sin], dim=-1)
    return Bounded(value, moved + STEP * value.float().abs())


def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, own_v: Tensor | None = None) -> Bounded:
    """Attention of one sequence: q [n, Hq, D] of its last n positions, k and v [L, Hkv, D] bf16 -> [n, Hq * D].

    P is rounded on both sides, relative to another maximum: each term may differ by 2^-8 of itself, 2^-9.3 in the mean,
    so ten deviations of the sum are 2^-6 of q = sqrt(sum of squared terms).

    Args:
        k, v: of the sequence's last L positions; those that a window hides may be left out.
        window: keys that a query sees, itself included; 0 for all.
        own_v: of an op that makes q and the step's own K and V itself: how far this V [n, Hkv, D] may be off.
    """
    new, heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    keys, values = (x.transpose(0, 1).double() for x in (k, v))
    sink = sinks.float().view(kv_heads, -1, 1, 1)
    results, allowances = [], []
    block = max(1, _BLOCK_LOGITS // (heads * length))
    for row in range(0, new, block):
        rows = q[row : row + block].double().view(-1, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        logits = (rows @ keys.unsqueeze(1).transpose(-1, -2)).float() * dim**-0.5
        at = torch.arange(length - new + row, length - new + row + rows.shape[2], device=q.device)
        distance = at[:, None] - torch.arange(length, device=q.device)
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        logits.masked_fill_(hidden, -torch.inf)
        top = torch.maximum(logits.amax(-1, keepdim=True), sink)
        p = torch.exp(logits - top)
        total = (p.sum(-1, keepdim=True, dtype=torch.float64) + torch.exp(sink - top)).float()
        p = p.bfloat16().double()
        out = ((p @ values.unsqueeze(1)).float() / total).bfloat16()
        size = (p.square() @ values.square().unsqueeze(1)).sqrt().float() / total
        results.append(out.permute(2, 0, 1, 3).reshape(-1, heads * dim))
        allowed = STEP * out.float().abs() + (2.0**-6 if own_v is None else 2.0**-6 + LOGITS) * size
        if own_v is not None:
            own = own_v.transpose(0, 1).double().unsqueeze(1)
            allowed += ((p[..., length - new :] @ own) / total).float()
        allowances.append(allowed.permute(2, 0, 1, 3).reshape(-1, heads * dim))
    return Bounded(torch.cat(results), torch.cat(allowances))


def _exact(value: Tensor) -> Bounded:
    return Bounded(value, torch.zeros(value.shape, device=value.device))


OPS: dict[str, Callable[[Fields, Tensors], dict[str, Bounded]]] = {
    "Linear": linear,
    "NormMlp": norm_mlp,
    "NormMoe": norm_moe,
    "LmHead": lm_head,
    "NormQkvRope": norm_qkv_rope,
}
"""By name; node fields and inputs by binding name, as in the schemas. NormQkvRope writes no pool: it gives k and v."""


def check(found: Tensor, expected: Bounded, all_of: float, what: str) -> None:
    """Every element within its allowance, and the errors' root mean square within `all_of` of the values'.

    One token in twenty (or one) may be off by FLIPPED: a norm flips in about 1 % of tokens. Dimension 0 is tokens.
    """
    assert found.shape == expected.value.shape, f"{what}: {list(found.shape)} for {list(expected.value.shape)}"
    wanted = expected.value.float()
    error = (found.float() - wanted).abs()
    over = torch.where(error.isfinite(), error - expected.allowed, torch.inf)
    worst = int(over.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), over.shape)]
    assert over.flatten()[worst] <= 0, (
        f"{what}: {int((over > 0).sum())} of {over.numel()} differ, worst at {place}: {float(found.flatten()[worst])} "
        f"for {float(wanted.flatten()[worst])}, allowed {float(expected.allowed.flatten()[worst]):.3g}"
    )
    scale = float(wanted.double().square().mean().sqrt())
    squares = error.double().square().flatten(1).mean(1).sort().values
    rest = squares[: len(squares) - max(1, len(squares) // 20)]
    for which, mean, most in (("worst token's", squares[-1:], FLIPPED), ("other tokens'", rest, all_of)):
        rms = float(mean.mean().sqrt()) if len(mean) else 0.0
        assert rms <= most * scale, f"{what}: the {which} rms error {rms:.3g} is {rms / scale:.2e} of {scale:.3g}"


# --- The model --------------------------------------------------------------------------------------------------------


def forward(
    config: ModelConfig, weights: Tensors, token_ids: Tensor, rows: Sequence[int], chosen: Mapping[int, Tensor]
) -> Tensor:
    """Logits [rows, V] f32 of a whole sequence at once, without pools.

    Args:
        weights: an engine's tensors by name.
        token_ids: [T] integers.
        rows: tokens whose logits are wanted.
        chosen: by layer, the experts [T, k] to take instead of the router's choice.
    """
    eps: Fields = {"eps": config.rms_norm_eps, "top_k": config.num_experts_per_tok}
    shape: Fields = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    positions = torch.arange(len(token_ids), device=token_ids.device)
    delta = weights["embedding"][token_ids.long()]
    stream: dict[str, Tensor] = {"delta": delta}
    residual = delta
    for layer in range(config.num_hidden_layers):
        name, full = f"layers.{layer}", config.is_full(layer)
        t = {**stream, **_bound(weights, f"{name}.attn", norm="norm", q_norm="q_norm", k_norm="k_norm", qkv="qkv")}
        if not full:
            t |= {"rope": weights["rope"], "positions": positions}
        qkv = norm_qkv_rope({**eps, **shape}, t)
        residual = qkv["residual_out"].value if "residual_out" in qkv else residual
        q, k, v = (qkv[part].value for part in "qkv")
        core = attention(q, k, v, weights[f"{name}.attn.sinks"], 0 if full else config.sliding_window).value
        delta = linear(eps, {"x": core, **_bound(weights, f"{name}.attn", weight="out")})["y"].value
        t = {"delta": delta, "residual": residual, "norm": weights[f"{name}.mlp.norm"]}
        if config.is_dense(layer):
            out = norm_mlp(eps, t | _bound(weights, f"{name}.mlp", gate_up="gate_up", down="down"))
        else:
            parts = {
                f"{kind}_{part}": f"{kind}.{part}" for kind in ("experts", "shared") for part in ("gate_up", "down")
            }
            out = norm_moe(eps, t | _bound(weights, f"{name}.mlp", router="router", **parts), chosen.get(layer))
        delta, residual = out["out"].value, out["residual_out"].value
        stream = {"delta": delta, "residual": residual}
    t = {**stream, "norm": weights["head.norm"], **_bound(weights, "head", weight="")}
    t["logits_rows"] = torch.tensor(rows, device=token_ids.device)
    return lm_head(eps, t)["logits"].value


def _bound(weights: Tensors, prefix: str, **names: str) -> dict[str, Tensor]:
    """Weights by binding name: `prefix.name`, or where that is packed `prefix.name.weight` and `.scale`."""
    found = {}
    for binding, name in names.items():
        full = f"{prefix}.{name}" if name else prefix
        if full in weights:
            found[binding] = weights[full]
            continue
        found[binding] = weights[f"{full}.weight"]
        if f"{full}.scale" in weights:
            found[f"{binding}_scale"] = weights[f"{full}.scale"]
    return found
