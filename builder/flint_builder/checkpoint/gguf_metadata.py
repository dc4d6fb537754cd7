"""Metadata of a GGUF file: what it may say beside Flint's config.json, and what must not be ignored.

Every key that gguf-py knows below the architecture's name changes what a model computes, or says how large it is: it
agrees with config.json, has a value with which nothing differs from Flint, stands in a list of what means nothing here,
or is refused by name. Keys that nobody knows are named in one warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from math import isclose
from pathlib import Path
from typing import NoReturn

from gguf.constants import ExpertGatingFuncType, Keys

from flint_builder.checkpoint.gguf import GgufHeader, Skipped, Value
from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError, shown
from flint_runtime.small_files import listed

logger = logging.getLogger(__name__)

ARCHITECTURE = "flint"
UNIT_SCALES_KEY = "tensor_scale"
"""Below the architecture's name: a file says with the value 1 that NVFP4 tensors without a tensor scale have none."""

_FLOAT32_TOLERANCE = 1e-6
"""Relative; GGUF stores floats in 32 bits."""
_SPLIT_COUNT = Keys.Split.LLM_KV_SPLIT_COUNT

# Keys below "<architecture>." that must agree with a field of config.json; one value, or the same for every layer.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    **dict.fromkeys(("attention.key_length", "attention.value_length"), "head_dim"),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), "head_dim"),
    **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa"), "head_dim"),
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), "rope_theta"),
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}

# What follows from config.json in another form: key, and the values that it may have.
_DERIVED: dict[str, Callable[[ModelConfig], tuple[object, ...]]] = {
    # Converters count the query itself, or only what is before it.
    "attention.sliding_window": lambda c: (c.sliding_window, c.sliding_window - 1),
    "attention.scale": lambda c: (c.head_dim**-0.5,),
    "leading_dense_block_count": lambda c: (c.leading_dense_layers,),
    # One expert as Flint stores it, or in units of a routed expert's size, as llama.cpp's converter counts.
    "expert_shared_count": lambda c: (1, c.shared_expert_intermediate_size / c.moe_intermediate_size),
    **dict.fromkeys(
        ("attention.sliding_window_pattern", "attention.rope_pattern", "rope.pattern", "rope_pattern"),
        lambda c: (tuple(not c.is_full(layer) for layer in range(c.num_hidden_layers)),),
    ),
}

# Values with which a key leaves Flint's arithmetic as it is.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_gating_func": (int(ExpertGatingFuncType.SIGMOID),),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), (1,)),
    **dict.fromkeys(("nextn_predict_layers", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"), (1.0,)),
    **dict.fromkeys(("attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping"), (0.0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "swiglu_clamp_exp"), (0.0,)),
    "swiglu_clamp_shexp": (0.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.type": ("none",),
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.attn_factor"), (1.0,)),
    UNIT_SCALES_KEY: (1.0,),
}

# Tensor shapes tell the first; a build's --max-context and config.json the second.
_HARMLESS = frozenset({"feed_forward_length", "context_length"})
_HARMLESS_ELSEWHERE = (
    re.compile(r"tokenizer\..+"),  # the engine takes the Hugging Face files
    re.compile(r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label)"),
    re.compile(r"general\.(license.*|url|doi|uuid|repo_url|tags|languages|datasets|file_type|alignment|architecture)"),
    re.compile(r"general\.(source|base_model|dataset|sampling)\..+"),  # sampling: generation_config.json's counts
    re.compile(r"general\.tensor_extra\.(name|.*prec_a4)"),  # prec_a4 has a check of its own
    re.compile(r"(quantize\.)?imatrix\..+"),
    re.compile(r"split\..+"),
)
_ELSEWHERE: dict[str, tuple[object, ...]] = {"general.type": ("model",), "general.quantization_version": (2,)}


def check_metadata(header: GgufHeader, config: ModelConfig, config_path: Path) -> None:
    """Compare a file's metadata with `config`, which was read from `config_path`, and with what Flint does.

    Raises:
        CheckpointError: another architecture, one part of several, FP4 activations, or a key that contradicts.
    """
    _check_kind(header)
    unknown = []
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{ARCHITECTURE}.")
        if name == key:
            if not _check_elsewhere(header, key, value):
                unknown.append(key)
        elif name in _FIELDS:
            field = _FIELDS[name]
            if not _agrees(value, (getattr(config, field),)):
                _disagree(f"{key} is {_text(value)}", header, f"{field} is {getattr(config, field)}", config_path)
        elif name in _DERIVED:
            if not _agrees(value, _DERIVED[name](config)):
                expected = " or ".join(shown(v) for v in _DERIVED[name](config))
                _disagree(f"{key} is {_text(value)}", header, f"{expected} follows from the layers", config_path)
        elif name in _NEUTRAL:
            if not _agrees(value, _NEUTRAL[name]):
                _refuse(header, key, value, _NEUTRAL[name])
        elif name.startswith("rope.scaling.") or (name in _known_to_gguf() and name not in _HARMLESS):
            _refuse(header, key, value)
        elif name not in _HARMLESS:
            unknown.append(key)
    if unknown:
        logger.warning(
            "%s has %d metadata keys that are not known and not used: %s.",
            header.file,
            len(unknown),
            listed([shown(key) for key in sorted(unknown)]),
        )
    _check_embedding(header, config, config_path)


def says_scales_are_one(header: GgufHeader) -> bool:
    """Whether the file says that NVFP4 tensors without a tensor scale have the scale 1."""
    return f"{ARCHITECTURE}.{UNIT_SCALES_KEY}" in header.metadata


def _check_kind(header: GgufHeader) -> None:
    architecture = header.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        found = "missing" if architecture is None else _text(architecture)
        raise CheckpointError(
            f"{header.file}: general.architecture is {found}, expected {ARCHITECTURE!r}. Pass a Flint checkpoint."
        )
    parts = header.metadata.get(_SPLIT_COUNT, 0)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{header.file} is one of {_text(parts)} parts ({_SPLIT_COUNT}); merge them into one file "
            "(llama-gguf-split --merge)."
        )
    marked = [key for key, value in header.metadata.items() if key.endswith("prec_a4") and _is_set(value)]
    marked += [name for name in header.tensors if name.endswith("prec_a4")]
    if marked:
        raise CheckpointError(
            f"{header.file}: {marked[0]} is set: the model expects activations in FP4, which are not supported; "
            "Flint runs NVFP4 weights with BF16 activations. Use a file made for weight-only NVFP4 (W4A16)."
        )


def _check_elsewhere(header: GgufHeader, key: str, value: Value) -> bool:
    """Check a key that is not below the architecture's name; whether it is known."""
    if key in _ELSEWHERE:
        if not _agrees(value, _ELSEWHERE[key]):
            _refuse(header, key, value, _ELSEWHERE[key])
        return True
    if key.startswith("general.tensor_extra.") and not any(p.fullmatch(key) for p in _HARMLESS_ELSEWHERE):
        _refuse(header, key, value)
    return any(pattern.fullmatch(key) for pattern in _HARMLESS_ELSEWHERE)


def _check_embedding(header: GgufHeader, config: ModelConfig, config_path: Path) -> None:
    embedding = header.tensors.get("token_embd.weight")
    if embedding and len(embedding.shape) == 2 and embedding.shape[0] != config.vocab_size:
        theirs = f"token_embd.weight has {embedding.shape[0]} rows (vocabulary)"
        _disagree(theirs, header, f"vocab_size is {config.vocab_size}", config_path)


def _agrees(value: Value, allowed: tuple[object, ...]) -> bool:
    """Whether a value is one of those allowed, or an array with such a value for every layer."""
    if value in allowed:
        return True
    if isinstance(value, tuple):
        return bool(value) and all(_agrees(item, allowed) for item in value)
    if isinstance(value, bool | str | Skipped):
        return False
    return any(isinstance(item, int | float) and isclose(value, item, rel_tol=_FLOAT32_TOLERANCE) for item in allowed)


def _is_set(value: Value) -> bool:
    if isinstance(value, tuple):
        return any(value)
    return value.count > 0 if isinstance(value, Skipped) else bool(value)


@cache
def _known_to_gguf() -> frozenset[str]:
    return frozenset(_architecture_keys(Keys))


def _architecture_keys(keys: type) -> Iterator[str]:
    """Names of gguf-py's keys below the architecture's name, without it."""
    for value in vars(keys).values():
        if isinstance(value, type):
            yield from _architecture_keys(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


def _text(value: Value) -> str:
    return f"an array or text of {value.count}" if isinstance(value, Skipped) else shown(value)


def _refuse(header: GgufHeader, key: str, value: Value, allowed: tuple[object, ...] = ()) -> NoReturn:
    support = f"support only {' or '.join(map(repr, allowed))}" if allowed else "have no such thing"
    raise CheckpointError(
        f"{header.file}: {listed([key])} is {_text(value)}; Flint's kernels {support}. The file describes another "
        "model, or its converter was wrong; pass a Flint checkpoint."
    )


def _disagree(theirs: str, header: GgufHeader, ours: str, config_path: Path) -> NoReturn:
    raise CheckpointError(
        f"{theirs} in {header.file}, but {ours} in {config_path}: the two belong to different models. "
        "Pass the directory of the BF16 checkpoint that the GGUF file was made from with --hf-config."
    )
