"""Finding a checkpoint: files, directories, the hub, and what is refused rather than guessed."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flint_builder.checkpoint import WeightsChoice, open_checkpoint
from flint_runtime.errors import CheckpointError, ResourceError, UsageError
from tests.builder.checkpoint import tiny
from tests.permissions import without_override
from tests.shapes import NANO_DIRECTORY

SIDE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A directory with a GGUF file and safetensors."""
    tiny.bf16(tmp_path)
    tiny.nvfp4(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("weights", "found"), [("auto", "nvfp4"), ("nvfp4", "nvfp4"), ("bf16", "bf16")])
def test_directory_with_both(both: Path, weights: WeightsChoice, found: str) -> None:
    checkpoint = open_checkpoint(str(both), weights=weights)
    assert checkpoint.weights == found
    assert checkpoint.source == str(both / ("tiny.gguf" if found == "nvfp4" else "model.safetensors"))
    assert set(checkpoint.assets) == set(SIDE_FILES) - {"config.json"}
    assert checkpoint.bytes == sum(tensor.bytes for tensor in checkpoint.tensors.values())


@pytest.mark.parametrize(("name", "found"), [("tiny.gguf", "nvfp4"), ("model.safetensors", "bf16")])
def test_file(both: Path, name: str, found: str) -> None:
    assert open_checkpoint(str(both / name)).weights == found


def test_index_file(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    assert open_checkpoint(str(directory / "model.safetensors.index.json")).weights == "bf16"


def test_nvfp4_wanted_from_bf16(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path)
    for spec in (directory, directory / "model.safetensors"):
        with pytest.raises(UsageError, match=r"BF16 weights only.*does not convert"):
            open_checkpoint(str(spec), weights="nvfp4")


def test_bf16_wanted_from_nvfp4(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    for spec in (path, tmp_path):
        with pytest.raises(UsageError, match="NVFP4 weights only"):
            open_checkpoint(str(spec), weights="bf16")


def test_two_gguf_files_are_listed(both: Path) -> None:
    (both / "other.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2 candidates: other\.gguf, tiny\.gguf\. Pass the path"):
        open_checkpoint(str(both))
    assert open_checkpoint(str(both), weights="bf16").weights == "bf16"


def test_two_safetensors_without_index_are_listed(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path)
    (directory / "other.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2 candidates: model\.safetensors, other\.safetensors"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("name", ["flint-00001-of-00002.gguf", "flint-00002-of-00002.gguf"])
def test_part_of_a_gguf_file_must_be_merged(tmp_path: Path, name: str) -> None:
    path = tiny.nvfp4(tmp_path).rename(tmp_path / name)
    for spec in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"part \d of 2 by its name.*merge the parts"):
            open_checkpoint(str(spec))
    path.rename(tmp_path / "flint-00001-of-00001.gguf")
    assert open_checkpoint(str(tmp_path)).weights == "nvfp4"


def test_several_parts_of_a_gguf_file(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    for part in (1, 2, 3):
        (tmp_path / f"a-{part:05}-of-00003.gguf").write_bytes(b"")
    path.unlink()
    with pytest.raises(CheckpointError, match="part 1 of 3"):
        open_checkpoint(str(tmp_path))


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=300_000)
    shard = sorted(directory.glob("*.safetensors"))[0]
    with pytest.raises(CheckpointError, match=r"part 1 of \d+ by its name. Pass its directory, or .*index\.json"):
        open_checkpoint(str(shard))
    (directory / "model.safetensors.index.json").unlink()
    for spec in (directory, shard):
        with pytest.raises(
            CheckpointError, match=r"of \d+ parts .*no index that names them \(model\.safetensors\.index"
        ):
            open_checkpoint(str(spec))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", *SIDE_FILES[1:]])
def test_git_lfs_pointers_are_named(tmp_path: Path, name: str) -> None:
    directory = tiny.bf16(tmp_path)
    (directory / name).write_bytes(tiny.LFS_POINTER)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*Git LFS pointer"):
        open_checkpoint(str(directory))


def test_git_lfs_pointer_in_the_place_of_an_index(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=300_000)
    (directory / "model.safetensors.index.json").write_bytes(tiny.LFS_POINTER)
    with pytest.raises(CheckpointError, match="is no index: it is a Git LFS pointer"):
        open_checkpoint(str(directory))


def test_config_and_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path / "gguf")
    for side in ("config", "tokenizer"):
        (tmp_path / side).mkdir()
    for name in SIDE_FILES:
        side = "config" if name in ("config.json", "generation_config.json") else "tokenizer"
        (path.parent / name).rename(tmp_path / side / name)
    with pytest.raises(CheckpointError, match=r"has no config\.json.*--hf-config"):
        open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json.*--tokenizer"):
        open_checkpoint(str(path), hf_config=tmp_path / "config")
    checkpoint = open_checkpoint(str(path), hf_config=tmp_path / "config", tokenizer=tmp_path / "tokenizer")
    for side, name in (("tokenizer", "tokenizer.json"), ("config", "generation_config.json")):
        assert checkpoint.assets[name] == (tmp_path / side / name).read_bytes()


def test_optional_assets_may_be_absent(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (tmp_path / name).unlink()
    tiny.edit_config(tmp_path, eos_token_id=None)
    assert set(open_checkpoint(str(path)).assets) == {"tokenizer.json"}


def test_options_that_are_no_directories(both: Path) -> None:
    with pytest.raises(UsageError, match=r"--hf-config .* is not a directory"):
        open_checkpoint(str(both), hf_config=both / "config.json")
    with pytest.raises(UsageError, match=r"--tokenizer .* does not exist"):
        open_checkpoint(str(both), tokenizer=both / "nowhere")


@pytest.mark.parametrize("spec", ["nowhere", "/nowhere/at/all", "a/b/c", "org/model.gguf", "", "org/"])
def test_path_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, CheckpointError)) as error:
        open_checkpoint(spec)
    assert ("does not exist" in str(error.value)) == bool(spec)


def test_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(UsageError, match=r"neither a \.gguf nor a \.safetensors"):
        open_checkpoint(str(path))


def test_pipe_in_the_place_of_a_file(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(str(path), weights="nvfp4")


def test_unreadable_is_not_missing(tmp_path: Path) -> None:
    """Whatever may not be read is named with the reason, never passed over."""
    path = tiny.nvfp4(tmp_path / "model")
    for locked, spec in ((path, path), (path.parent, path), (path.parent, path.parent)):
        mode = locked.stat().st_mode
        locked.chmod(0)
        with without_override(), pytest.raises((CheckpointError, PermissionError), match="Permission denied"):
            open_checkpoint(str(spec))
        locked.chmod(mode)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        open_checkpoint(str(tmp_path / "loop"))
    with pytest.raises(OSError, match="File name too long"):
        open_checkpoint("x" * 300)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("../blobs/1234")
    for name in SIDE_FILES:
        (tmp_path / name).write_bytes((NANO_DIRECTORY / name).read_bytes())
    with pytest.raises(UsageError, match=r"leads to \.\./blobs/1234, which does not exist"):
        open_checkpoint(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"leads to \.\./blobs/1234, which does not exist"):
        open_checkpoint(str(tmp_path))


def test_too_many_open_files(tmp_path: Path) -> None:
    directory = tiny.bf16(tmp_path, max_shard_bytes=100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
    try:
        with pytest.raises(ResourceError, match=r"Too many open files.*ulimit -n"):
            open_checkpoint(str(directory))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(str(tmp_path))


Download = Callable[..., str]


def hub(monkeypatch: pytest.MonkeyPatch, download: Download) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("auto", [["*.gguf"], ["*.safetensors"]]), ("bf16", [["*.safetensors"]]), ("nvfp4", [["*.gguf"]])],
)
def test_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: WeightsChoice, expected: list[list[str]]
) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "org/flint"
        asked.append([p for p in allow_patterns if p not in ("*.json", "*.jinja")])
        tiny.bf16(tmp_path)
        return str(tmp_path)

    hub(monkeypatch, download)
    if weights == "nvfp4":
        with pytest.raises(UsageError, match="does not convert"):
            open_checkpoint("org/flint", weights=weights)
    else:
        assert open_checkpoint("org/flint", weights=weights).weights == "bf16"
    assert asked == expected


def test_repository_with_gguf_is_not_fetched_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        tiny.nvfp4(tmp_path)
        return str(tmp_path)

    hub(monkeypatch, download)
    assert open_checkpoint("org/flint").weights == "nvfp4"
    assert len(asked) == 1


def test_local_directory_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise AssertionError("asked the hub")

    hub(monkeypatch, download)
    monkeypatch.chdir(tmp_path)
    tiny.nvfp4(tmp_path / "org" / "flint")
    assert open_checkpoint("org/flint").weights == "nvfp4"


def test_hub_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint("some-org/no-such-model")
    message = str(error.value)
    assert "some-org/no-such-model is no local path" in message and "pass its directory" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/cache/blob"), ResourceError, r"No space left.*/cache/blob"),
        (OSError(errno.EACCES, "Permission denied", "/cache"), CheckpointError, "Permission denied"),
        (ConnectionError("no route\nto the host"), CheckpointError, "no route"),
        (ValueError(""), CheckpointError, "ValueError"),
    ],
)
def test_download_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception, error: type[Exception], message: str
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise trouble

    hub(monkeypatch, download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        open_checkpoint("org/flint")
