"""Keys of config.json beside those that ModelConfig reads: what they may say, and which mean nothing to inference.

A key that can change a number is checked to say what Flint does, or refused. Keys in NEUTRAL are Flint's own
(transformers' and vLLM's FlintConfig) and those with which related models change their arithmetic. What is in no table
is reported to the caller, who warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flint_runtime.errors import shown
from flint_runtime.rope_parameters import ROPE_KEYS

if TYPE_CHECKING:
    from flint_runtime.config import ModelConfig

_OFF = (None, False, 0)
_ONE = (None, 1)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Flint's.
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "router_score_function": ("sigmoid",),
    "use_sliding_window": (True,),
    "dtype": ("bfloat16",),  # the runtime computes in no other; the tensors' own types are checked one by one
    "torch_dtype": ("bfloat16",),
    # The same under other names.
    "hidden_activation": ("silu",),
    "activation_function": ("silu",),
    **dict.fromkeys(("score_func", "score_function", "scoring_func", "moe_router_score_function"), ("sigmoid",)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "use_rms_norm", "use_rmsnorm"), (True,)),
    **dict.fromkeys(("norm_type", "normalization"), ("rmsnorm", "RMSNorm")),
    "position_embedding_type": ("rope",),
    # Biases.
    **dict.fromkeys(("qkv_bias", "use_qkv_bias", "add_qkv_bias", "mlp_bias", "use_bias", "add_bias_linear"), _OFF),
    **dict.fromkeys(("use_expert_bias", "moe_router_enable_expert_bias", "lm_head_bias"), _OFF),
    # Routing.
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "moe_router_topk_scaling_factor"), _ONE),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "num_limited_groups"), _ONE),
    **dict.fromkeys(("moe_layer_freq", "moe_layer_frequency", "interleave_moe_layer_step"), _ONE),
    "topk_method": ("greedy",),
    "shared_expert_gate": _OFF,
    "router_logit_softcapping": _OFF,
    # Scaling and clamping.
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "clip_qkv"), _OFF),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "attention_multiplier", "attn_temperature_tuning"), _OFF),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), _ONE),
    **dict.fromkeys(("scale_emb", "scale_depth", "mup_width_multiplier", "rope_ratio"), _ONE),
    # Positions.
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_percent"), _ONE),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "use_alibi", "alibi", "rope_local_base_freq"), _OFF),
    **dict.fromkeys(("rotary_emb_base", "original_max_position_embeddings", "mrope_section"), _OFF),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "attention_chunk_size"), _OFF),
    # Another structure.
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "num_kv_shared_layers"), _OFF),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "index_topk"), _OFF),
    **dict.fromkeys(("use_parallel_residual", "parallel_attn", "is_encoder_decoder", "add_cross_attention"), _OFF),
    **dict.fromkeys(("tie_encoder_decoder", "cross_attention_hidden_size", "attention_k_eq_v"), _OFF),
    **dict.fromkeys(("text_config", "vision_config", "audio_config", "per_layer_config"), (None,)),
    "pruned_heads": (None, {}),
}
"""Values that leave Flint's arithmetic as it is. Null is always one: it is the same as no key."""

_QUANTIZATION = frozenset({"quantization_config", "compression_config"})

_HARMLESS_NAMES = """
_name_or_path name_or_path _commit_hash transformers_version auto_map model_name model_type license language
unsloth_version unsloth_fixed tokenizer_class prefix
initializer_range initializer_factor router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux
output_router_logits router_jitter_noise gradient_checkpointing
attention_dropout hidden_dropout dropout attn_pdrop embd_pdrop resid_pdrop residual_dropout classifier_dropout
use_cache use_flash_attn attn_implementation _attn_implementation _attn_implementation_autoset
experts_implementation _experts_implementation torchscript use_bfloat16 tf_legacy_loss pretraining_tp ep_size
chunk_size_feed_forward is_decoder keys_to_ignore_at_inference base_model_tp_plan base_model_pp_plan
base_model_ep_plan
return_dict use_return_dict output_attentions output_hidden_states output_scores return_dict_in_generate
num_labels id2label label2id problem_type finetuning_task task_specific_params
bos_token_id pad_token_id eos_token_id sep_token_id unk_token_id decoder_start_token_id image_token_id
do_sample temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty early_stopping num_beams num_beam_groups
diversity_penalty num_return_sequences max_length min_length
"""
HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""What transformers writes into every config.json; settings of training; those of generation, which count only in
generation_config.json, for transformers as for us (but eos_token_id is read for a checkpoint without that file)."""

# Names of other models, and of converters, for what ModelConfig reads: the value must be the field's.
_ALIASES = {
    "num_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_topk": "num_experts_per_tok",
    "top_k_experts": "num_experts_per_tok",
    "num_experts_per_token": "num_experts_per_tok",
    "rotary_dim": "head_dim",
    "kv_channels": "head_dim",
    "v_head_dim": "head_dim",
    "query_pre_attn_scalar": "head_dim",
    "norm_eps": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "window_size": "sliding_window",
}
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_COUNTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_OTHERS = frozenset({"architectures", "no_rope_layer_indices"})


def check_keys(raw: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """Check what config.json says beside the fields of `config`, which was read from it.

    Returns:
        the keys that no table knows, sorted.
    Raises:
        ValueError: a key says something that Flint does not do; the text names key, value and what is expected.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    for name in _QUANTIZATION & given.keys():
        raise ValueError(
            f"{name} is {shown(given[name])}: this file belongs to weights of another quantisation. Flint is built "
            "from BF16 safetensors, or from the NVFP4 GGUF file with the config.json of the BF16 checkpoint"
        )
    for name, allowed in _expected(config).items():
        if name in given and not any(given[name] == value for value in allowed):
            expected = " or ".join(repr(value) for value in allowed if value is not None) or "none"
            raise ValueError(f"{name} is {shown(given[name])}; Flint's kernels support only {expected}")
    _check_architectures(given.get("architectures"))
    _check_no_rope_layers(given.get("no_rope_layer_indices"), config)
    known = type(config).model_fields.keys() | ROPE_KEYS | HARMLESS | _expected(config).keys() | _OTHERS
    return sorted(given.keys() - known)


def _expected(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Every key with a table of values that it may have in the config.json of `config`."""
    shared = (1, config.shared_expert_intermediate_size / config.moe_intermediate_size)
    return {
        **NEUTRAL,
        **{alias: (getattr(config, field),) for alias, field in _ALIASES.items()},
        **dict.fromkeys(_SHARED_COUNTS, shared),
        **dict.fromkeys(_DENSE_COUNTS, (config.leading_dense_layers,)),
    }


def _check_architectures(value: Any) -> None:
    if value is not None and (not isinstance(value, list) or "FlintForCausalLM" not in value):
        raise ValueError(f"architectures is {shown(value)}, expected ['FlintForCausalLM']")


def _check_no_rope_layers(value: Any, config: ModelConfig) -> None:
    if value is None:
        return
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise ValueError(f"no_rope_layer_indices is {shown(value)}, expected a list of layers")
    if sorted(value) != list(config.full_layers):
        raise ValueError(
            f"no_rope_layer_indices {shown(sorted(value))} differs from the full-attention layers "
            f"{list(config.full_layers)} of layer_types; in Flint exactly those have no RoPE. Correct the file"
        )
