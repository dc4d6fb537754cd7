"""Finding a checkpoint's files and opening it.

What cannot be read is never taken for missing: then a file that nobody may read would be passed over in silence.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Literal

from flint_builder.checkpoint.assets import read_assets
from flint_builder.checkpoint.base import Checkpoint
from flint_builder.checkpoint.gguf_checkpoint import GgufCheckpoint
from flint_builder.checkpoint.hub import fetch_repository
from flint_builder.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flint_builder.checkpoint.shards import refuse_parts
from flint_runtime.config import ModelConfig
from flint_runtime.errors import CheckpointError, UsageError
from flint_runtime.manifest import WeightFormat

WeightsChoice = Literal["auto", "nvfp4", "bf16"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_checkpoint(
    spec: str,
    *,
    weights: WeightsChoice = "auto",
    hf_config: Path | None = None,
    tokenizer: Path | None = None,
    lenient_scales: bool = False,
) -> Checkpoint:
    """Open a checkpoint; reads headers only.

    Args:
        spec: a .gguf or .safetensors file, a directory, or a Hugging Face repo id (fetched if no such path exists).
        weights: the format wanted; "auto" prefers NVFP4 where a directory holds both.
        hf_config: directory with config.json; by default the directory of the weights.
        tokenizer: directory with the tokenizer's files; by default that of config.json.
        lenient_scales: decode irregular NVFP4 block scales as ggml does instead of refusing them.
    Raises:
        UsageError: the arguments leave open, or contradict, what to read.
        CheckpointError: the checkpoint is incomplete, damaged, contradictory or of an unsupported kind.
        OSError: a file or directory cannot be read.
    """
    path, found = _find_weights(_local_path(spec, weights), weights)
    directory = _directory(hf_config, "--hf-config") or path.parent
    config_path = directory / "config.json"
    if not _is_file(config_path):
        raise CheckpointError(
            f"{directory} has no config.json, which {path} needs. Pass the directory of the BF16 checkpoint that has "
            "it with --hf-config."
        )
    config = ModelConfig.from_file(config_path)
    assets = read_assets(directory, _directory(tokenizer, "--tokenizer") or directory, config)
    if found == "nvfp4":
        return GgufCheckpoint(path, config_path, config, assets, lenient_scales)
    return SafetensorsCheckpoint(path, config, assets)


def _local_path(spec: str, weights: WeightsChoice) -> Path:
    path = Path(spec)
    if _mode(path):
        return path
    if path.is_symlink():
        raise UsageError(f"{spec} leads to {os.readlink(path)}, which does not exist; correct the link.")
    if _REPOSITORY.fullmatch(spec) and not spec.endswith((".gguf", ".safetensors")):
        return fetch_repository(spec, weights)
    raise UsageError(f"{spec} does not exist; pass a .gguf or .safetensors file, a directory, or a repo id org/name.")


def _find_weights(path: Path, weights: WeightsChoice) -> tuple[Path, WeightFormat]:
    """The GGUF or safetensors file, or the index of several, and its format."""
    choices: dict[WeightFormat, Path | None] = {"nvfp4": None, "bf16": None}
    if _is_directory(path):
        files = sorted(path / name for name in os.listdir(path) if not name.startswith("."))
        ggufs = [file for file in files if file.name.endswith(".gguf")]
        safetensors = [file for file in files if file.name.endswith((".safetensors", ".safetensors.index.json"))]
        if weights != "bf16":
            choices["nvfp4"] = _only(ggufs, path)
        if weights != "nvfp4" and choices["nvfp4"] is None:
            choices["bf16"] = _find_safetensors(safetensors, path)
        has = {"nvfp4": bool(ggufs), "bf16": bool(safetensors)}
    else:
        refuse_parts([path])
        choices["nvfp4"] = path if path.name.endswith(".gguf") else None
        choices["bf16"] = path if path.name.endswith((".safetensors", ".safetensors.index.json")) else None
        if not any(choices.values()):
            raise UsageError(f"{path} is neither a .gguf nor a .safetensors file; pass one of these, or a directory.")
        has = {kind: file is not None for kind, file in choices.items()}
    for kind, file in choices.items():
        if file is not None and weights in ("auto", kind):
            return file, kind
    if weights == "nvfp4" and has["bf16"]:
        raise UsageError(
            f"{path} holds BF16 weights only, and --weights nvfp4 was asked for. Flint does not convert BF16 to NVFP4; "
            "pass the released NVFP4 GGUF file, or --weights bf16."
        )
    if weights == "bf16" and has["nvfp4"]:
        raise UsageError(
            f"{path} holds NVFP4 weights only (GGUF), and --weights bf16 was asked for. Pass the directory of the BF16 "
            "checkpoint, or --weights nvfp4."
        )
    raise CheckpointError(f"{path} holds no weights: expected one .gguf file or model*.safetensors.")


def _find_safetensors(files: list[Path], directory: Path) -> Path | None:
    index = _only([file for file in files if file.suffix == ".json"], directory)
    return index or _only([file for file in files if file.suffix != ".json"], directory)


def _only(files: list[Path], directory: Path) -> Path | None:
    refuse_parts(files)
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:10]) + (", …" if len(files) > 10 else "")
        raise UsageError(f"{directory} holds {len(files)} candidates: {names}. Pass the path of the one to build from.")
    return files[0] if files else None


def _directory(path: Path | None, option: str) -> Path | None:
    if path is not None and not _is_directory(path):
        raise UsageError(f"{option} {path} {'is not a directory' if _mode(path) else 'does not exist'}.")
    return path


def _mode(path: Path) -> int:
    """Kind and permissions of what a path leads to; 0 where there is nothing. Raises OSError where nobody can tell."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(_mode(path))


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))
