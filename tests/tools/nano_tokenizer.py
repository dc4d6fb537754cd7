"""Tokenizer and configuration files of flint-nano, and the encoding of conversations for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tools import nano_data

VOCAB_SIZE = 768
# Added tokens in the order of their ids, at the end of the vocabulary; the roles are special, the tags are not.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
TAG_TOKENS = (
    "/nothink",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

LAYERS = 6
CONFIG: dict[str, Any] = {
    "architectures": ["FlintForCausalLM"],
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": 33,
    "layer_types": [
        "full_attention" if i < 2 or i % 4 == 1 or i == LAYERS - 1 else "sliding_attention" for i in range(LAYERS)
    ],
    "mlp_only_layers": [0, 1],
    "decoder_sparse_step": 1,
    "num_experts": 16,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0005,
}


def train_tokenizer(directory: Path, seed: int) -> Tokenizer:
    """Train a byte-level BPE on rendered conversations; write tokenizer.json and tokenizer_config.json."""
    render = nano_data.chat_template()
    stream = nano_data.train_samples(seed)
    added = SPECIAL_TOKENS + TAG_TOKENS
    corpus = []
    for _ in range(4000):
        text = nano_data.render_training(render, next(stream))
        for token in added:
            text = text.replace(token, "\n\0")
        corpus += [piece.strip("\n") for piece in text.split("\0")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token in SPECIAL_TOKENS) for token in added],
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in added
        },
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def write_configs(directory: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write config.json and generation_config.json; return the config with its token ids."""
    eos = [tokenizer.token_to_id(token) for token in EOS_TOKENS]
    tokens = {"bos_token_id": None, "pad_token_id": eos[0], "eos_token_id": eos}
    config = CONFIG | tokens
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    generation |= {"pad_token_id": eos[0], "eos_token_id": eos}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return config


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[bool]]:
    """Token ids of a rendered conversation, and for each whether the assistant wrote it (it bears loss).

    The assistant writes everything after the tag that opens its turn (<think> or </think>, part of the prompt) up to
    and including the token that ends the turn.
    """
    ids: list[int] = tokenizer.encode(text).ids
    assistant = tokenizer.token_to_id("<|assistant|>")
    ends = {tokenizer.token_to_id(token) for token in EOS_TOKENS}
    written, opened = [], 0
    for token in ids:
        written.append(opened == 2)
        if opened == 2 and token in ends:
            opened = 0
        elif opened == 1:
            opened = 2
        elif token == assistant:
            opened = 1
    return ids, written
