"""The small files that an engine carries: tokenizer, chat template and generation config, checked as the run will."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError, EngineError, shown
from flint_runtime.small_files import MAX_CONFIG_BYTES, json_object, read_small_file
from flint_runtime.tokenizer import Tokenizer
from flint_runtime.tokenizer_files import GENERATION, SETTINGS, TOKENIZER, TokenizerFiles, read_contents

logger = logging.getLogger(__name__)


def read_assets(directory: Path, tokenizer: Path, config: ModelConfig) -> dict[str, bytes]:
    """Read and check the files of an engine that come from the checkpoint.

    Args:
        directory: has config.json, and generation_config.json where there is one.
        tokenizer: has tokenizer.json, and tokenizer_config.json and chat_template.jinja where there are.
    Returns:
        contents by name; without end-of-sequence ids in generation_config.json, those of config.json are put there.
    Raises:
        CheckpointError: a file is missing, damaged, or names tokens beyond the vocabulary.
    """
    try:
        contents = read_contents(tokenizer, directory)
        if TOKENIZER not in contents:
            raise CheckpointError(
                f"{tokenizer} has no tokenizer.json, which the engine needs. Pass the directory that has it with "
                "--tokenizer."
            )
        files = TokenizerFiles.parse(contents, str(tokenizer))
        generation = json_object(contents.get(GENERATION, b"{}"))
        if generation.get("eos_token_id") is None:
            eos = _other_eos(directory, contents, files)
            if eos is not None:
                contents[GENERATION] = json.dumps({**generation, "eos_token_id": eos}, indent=2).encode() + b"\n"
                files = TokenizerFiles.parse(contents, str(tokenizer))
        Tokenizer(files)
    except (ValueError, EngineError) as error:
        raise CheckpointError(
            f"The tokenizer's files in {tokenizer} cannot be used: {error}. Correct the file, or download it again."
        ) from None
    _check_ids(files, config, tokenizer, directory)
    if not files.eos_token_ids:
        logger.warning(
            "%s names no end-of-sequence token (eos_token_id): answers will end at max_tokens or stop texts only.",
            directory,
        )
    return contents


def _other_eos(directory: Path, contents: dict[str, bytes], files: TokenizerFiles) -> Any:
    """The end of sequence as config.json has it, else the eos_token of tokenizer_config.json; None for neither."""
    eos = json_object(read_small_file(directory / "config.json", MAX_CONFIG_BYTES)).get("eos_token_id")
    token = files.special_tokens.get("eos_token")
    if eos is not None or token is None:
        return eos
    found = files.tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"{SETTINGS}: eos_token is {shown(token)}, which is no token of {TOKENIZER}")
    return found


def _check_ids(files: TokenizerFiles, config: ModelConfig, tokenizer: Path, directory: Path) -> None:
    size = config.vocab_size
    beyond = {token: name for name, token in files.tokenizer.get_vocab().items() if token >= size}
    if beyond:
        first = min(beyond)
        raise CheckpointError(
            f"{tokenizer / TOKENIZER} has {len(beyond)} tokens beyond the model's vocabulary of {size} (vocab_size): "
            f"the first is {shown(beyond[first])} with id {first}. Tokenizer and model belong to different "
            "checkpoints; pass the right directory with --tokenizer."
        )
    wrong = [token for token in files.eos_token_ids if token >= size]
    if wrong:
        raise CheckpointError(
            f"{directory}: eos_token_id names token {wrong[0]}, but the model's vocabulary has {size} tokens "
            "(vocab_size). generation_config.json belongs to another checkpoint; correct it."
        )
