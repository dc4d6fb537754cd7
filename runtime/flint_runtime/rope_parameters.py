"""RoPE in config.json: the one base frequency of Flint's sliding layers, wherever the file has it.

transformers writes `rope_parameters`; older files have `rope_scaling`, a `rope_theta` beside it, and `type` for
`rope_type`. Parameters may stand per layer type. What these places say must agree, and be plain RoPE.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flint_runtime.errors import shown

DEFAULT_THETA = 10000.0
"""transformers' default for configs that name none."""
ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})

_LAYER_TYPES = ("sliding_attention", "full_attention")
# Values with which plain RoPE does nothing else.
_NEUTRAL: dict[str, Any] = {
    "rope_type": "default",
    "type": "default",
    "partial_rotary_factor": 1.0,
    "factor": 1.0,
    "attention_factor": 1.0,
}


def rope_theta(raw: Mapping[str, Any]) -> float:
    """The base frequency of a config.json.

    Raises:
        ValueError: another kind of RoPE than Flint's, or places that contradict each other; the text names them.
    """
    if raw.get("rope_parameters") and raw.get("rope_scaling") and raw["rope_parameters"] != raw["rope_scaling"]:
        raise ValueError(
            f"rope_parameters is {shown(raw['rope_parameters'])} and rope_scaling is {shown(raw['rope_scaling'])}; "
            "they must agree. Correct the file"
        )
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key) is not None:
            where, parameters = _of_sliding_layers(key, raw[key])
            _check_plain(where, parameters)
            found[f"{where}.rope_theta"] = parameters.get("rope_theta")
    found["rope_theta"] = raw.get("rope_theta")
    thetas = {where: _number(where, theta) for where, theta in found.items() if theta is not None}
    if len(set(thetas.values())) > 1:
        raise ValueError(
            f"{' and '.join(f'{where} is {theta:g}' for where, theta in thetas.items())}; they must agree. "
            "Correct the file"
        )
    return next(iter(thetas.values()), DEFAULT_THETA)


def _of_sliding_layers(key: str, value: Any) -> tuple[str, Mapping[str, Any]]:
    """The parameters of the sliding layers, and their place. `value` is one set for all layers, or one per type."""
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {shown(value)}, expected an object")
    if not any(kind in value for kind in _LAYER_TYPES):
        return key, value
    where = f"{key}.sliding_attention"
    others = [name for name in value if name not in _LAYER_TYPES and value[name] is not None]
    if others:
        raise ValueError(f"{key} has {shown(others[0])} beside parameters per layer type, which leaves open what holds")
    sliding, full = (value.get(kind) for kind in _LAYER_TYPES)
    if not isinstance(sliding, dict):
        raise ValueError(f"{where} is {shown(sliding)}, expected an object: Flint's sliding layers have RoPE")
    if full is not None and full != sliding:
        raise ValueError(
            f"{key}.full_attention is {shown(full)}, expected null: Flint's full-attention layers have no positions"
        )
    return where, sliding


def _check_plain(where: str, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name == "rope_theta" or value is None:
            continue
        if name not in _NEUTRAL:
            raise ValueError(
                f"{where} has {shown(name)}, which plain RoPE ('default') does not; only that is supported"
            )
        if value != _NEUTRAL[name]:
            raise ValueError(f"{where}.{name} is {shown(value)}; only {_NEUTRAL[name]!r} is supported")


def _number(where: str, value: Any) -> float:
    # The comparison, unlike math.isfinite, also takes integers that no float can hold; NaN fails it.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where} is {shown(value)}, expected a finite number")
    return float(value)
