"""Opening and verifying engine directories: engine.json, sizes, hashes. What files say is in test_engine_check."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from flint_runtime.engine import HASHED_BYTES, Engine, damaged_files, read_manifest
from flint_runtime.errors import EngineError
from flint_runtime.manifest import FileEntry, encode_manifest
from tests.manifests import manifest
from tests.runtime.engines import rewrite_manifest

FILES = {"weights/a.safetensors": b"a" * 1000, "plans/decode.plan": b"plan", "libflint_plugins.so": b"ELF"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An engine directory with made-up files."""
    entries = []
    for name, data in FILES.items():
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries.append(FileEntry(path=name, size=len(data), blake3=blake3(data).hexdigest()))
    (tmp_path / "engine" / "engine.json").write_bytes(encode_manifest(manifest(files=tuple(entries))))
    return tmp_path / "engine"


def problems(directory: Path) -> list[str]:
    done: list[int] = []
    found = list(damaged_files(directory, Engine.open(directory).manifest, done.append))
    assert sum(done) == sum(map(len, FILES.values()))
    return found


def test_opens(directory: Path) -> None:
    engine = Engine.open(directory)
    assert engine.library_path.read_bytes() == b"ELF"
    assert [p.name for p in engine.weight_paths()] == ["a.safetensors"]
    assert problems(directory) == []
    with pytest.raises(EngineError, match=r"has no graph/prefill\.onnx"):
        engine.graph_path("prefill")


def test_e3_other_architecture_is_refused(directory: Path) -> None:
    engine = Engine.open(directory)
    engine.check_device("sm120")
    with pytest.raises(EngineError, match=r"built for sm120; this GPU is sm90.*--target sm90"):
        engine.check_device("sm90")


def test_e3_other_tensorrt_is_refused(directory: Path) -> None:
    engine = Engine.open(directory)
    engine.check_backend("tensorrt-rtx", "1.7.1.116")
    for backend, version in (("tensorrt-rtx", "1.8.0"), ("tensorrt", "1.7.1.116")):
        with pytest.raises(EngineError, match=rf"built by tensorrt-rtx 1.7.1.116; here is {backend} {version}"):
            engine.check_backend(backend, version)


@pytest.mark.parametrize("name", FILES)
def test_e4_truncated_file_is_refused_at_opening(directory: Path, name: str) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EngineError, match=f"{name} has {len(FILES[name]) - 1} bytes, expected {len(FILES[name])}"):
        Engine.open(directory)


@pytest.mark.parametrize("name", FILES)
def test_e4_one_flipped_byte_is_found(directory: Path, name: str) -> None:
    """By verify, and at every opening in a small file."""
    engine, path = Engine.open(directory), directory / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = list(damaged_files(directory, engine.manifest, lambda count: None))
    assert len(found) == 1 and found[0].startswith(f"{name} has blake3")
    with pytest.raises(EngineError, match=f"is damaged: {name} has blake3"):
        Engine.open(directory)


def test_large_files_are_hashed_by_verify_only(directory: Path) -> None:
    path = directory / "weights/a.safetensors"
    with path.open("wb") as file:
        file.truncate(HASHED_BYTES + 1)
    digest = blake3(bytes(HASHED_BYTES + 1)).hexdigest()
    files = json.loads((directory / "engine.json").read_text())["files"]
    for entry in files:
        if entry["path"] == "weights/a.safetensors":
            entry |= {"size": HASHED_BYTES + 1, "blake3": digest}
    rewrite_manifest(directory, files=files)
    done: list[int] = []
    assert list(damaged_files(directory, Engine.open(directory).manifest, done.append)) == []
    assert sum(done) == sum(entry["size"] for entry in files)
    with path.open("r+b") as file:
        file.write(b"x")
    (problem,) = damaged_files(directory, Engine.open(directory).manifest, lambda count: None)
    assert problem.startswith("weights/a.safetensors has blake3")


def test_e4_missing_file_is_refused(directory: Path) -> None:
    (directory / "plans/decode.plan").unlink()
    with pytest.raises(EngineError, match=r"decode\.plan is missing"):
        Engine.open(directory)


def test_e8_engine_can_move(directory: Path, tmp_path: Path) -> None:
    moved = directory.rename(tmp_path / "elsewhere")
    assert Engine.open(moved).weight_paths()[0].exists()


@pytest.mark.parametrize("kind", ["directory", "pipe", "link to nothing", "below a file"])
def test_what_is_no_file_is_refused(directory: Path, kind: str) -> None:
    path = directory / "plans/decode.plan"
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    else:
        path.parent.rmdir()
        path.parent.write_bytes(b"")
    with pytest.raises(EngineError, match=r"decode\.plan (is no file|is missing|cannot be read)"):
        Engine.open(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_file_that_the_build_did_not_write_is_not_read(directory: Path, name: str) -> None:
    (directory / name).write_text("{}")
    with pytest.raises(EngineError, match=rf"{name} is not of this build"):
        Engine.open(directory)
    assert list(damaged_files(directory, read_manifest(directory), lambda count: None)) == [
        f"{name} is not of this build"
    ]


# --- engine.json --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "7", "null", '"\xff"', "\xff", "[" * 100_000, '{"a": ' * 100_000, " " * (5 << 20), "\0"]
)
def test_broken_manifest(directory: Path, damage: str) -> None:
    (directory / "engine.json").write_text(damage, "latin-1")
    with pytest.raises(EngineError, match=r"engine\.json (cannot be read|has engine format None)") as error:
        Engine.open(directory)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop", "unreadable"])
def test_a_manifest_that_is_no_file(directory: Path, kind: str) -> None:
    path = directory / "engine.json"
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "unreadable": "x" * 300}[kind])
    with pytest.raises(EngineError, match=r"engine\.json cannot be read: "):
        Engine.open(directory)


@pytest.mark.parametrize("version", [1, 2, 4, 99, None, "3", 3.5, [], {}])
def test_another_format_is_refused(directory: Path, version: object) -> None:
    """An older one has no digest; it is told apart before anything else is looked at."""
    document = json.loads((directory / "engine.json").read_text()) | {"format_version": version}
    del document["blake3"]
    (directory / "engine.json").write_text(json.dumps(document))
    with pytest.raises(EngineError, match=r"has engine format .*reads engine format 3\. Build the engine again"):
        Engine.open(directory)


def test_another_layout_is_refused(directory: Path) -> None:
    rewrite_manifest(directory, layout_version=99)
    with pytest.raises(EngineError, match="weight layout 99"):
        Engine.open(directory)


def paths(part: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in a document, by what holds it."""
    for key in list(part) if isinstance(part, dict) else range(len(part)):
        yield part, key
        if isinstance(part[key], dict | list):
            yield from paths(part[key])


def test_any_change_of_the_manifest_is_reported(directory: Path) -> None:
    """Whatever value it is, and whether it is changed, removed or repeated."""
    path = directory / "engine.json"
    text = path.read_text()
    count = len(list(paths(json.loads(text))))
    assert count > 50
    for index in range(count):
        for change in ("other", "gone", "again"):
            document = json.loads(text)
            part, key = list(paths(document))[index]
            if key in ("format_version", "blake3"):
                continue
            if change == "other":
                part[key] = part[key] + 1 if isinstance(part[key], int | float) else "other"
            elif change == "gone":
                del part[key]
            elif isinstance(part, list):
                part.append(part[key])
            else:
                continue
            path.write_text(json.dumps(document))
            with pytest.raises(EngineError, match=r"engine\.json was changed after the build"):
                Engine.open(directory)


def test_how_the_manifest_is_written_does_not_matter(directory: Path) -> None:
    path = directory / "engine.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(document.items())), indent=7, ensure_ascii=False))
    assert Engine.open(directory).manifest.files


@pytest.mark.parametrize("digest", [None, "", "0" * 64, 7, ["a"]])
def test_a_missing_or_wrong_digest_is_reported(directory: Path, digest: object) -> None:
    document = json.loads((directory / "engine.json").read_text())
    del document["blake3"]
    if digest is not None:
        document["blake3"] = digest
    (directory / "engine.json").write_text(json.dumps(document))
    with pytest.raises(EngineError, match=r"was changed after the build: its content has the digest [0-9a-f]{64}"):
        Engine.open(directory)


OUTSIDE = (
    "../outside.bin", "a/../../outside.bin", "/etc/passwd", "a//b", "./a", "a/.", "a/", "", ".", "..", "a\0b", "a\nb",
    "a\\b", "a\x1b[31m", "\u202e", "x" * 2000, "engine.json",
)  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_is_not_inside_is_refused(directory: Path, path: str) -> None:
    """Even with the right digest."""
    files = json.loads((directory / "engine.json").read_text())["files"]
    rewrite_manifest(directory, files=[*files, {"path": path, "size": 1, "blake3": "0" * 64}])
    with pytest.raises(EngineError, match=r"is not an engine manifest of format 3: files\.3\.path: ") as error:
        Engine.open(directory)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_a_file_that_is_listed_twice_is_refused(directory: Path) -> None:
    files = json.loads((directory / "engine.json").read_text())["files"]
    rewrite_manifest(directory, files=[*files, files[0]])
    with pytest.raises(EngineError, match=r"files lists weights/a\.safetensors more than once"):
        Engine.open(directory)


def test_a_key_that_comes_twice_is_refused(directory: Path) -> None:
    """Readers differ in which value they take."""
    path = directory / "engine.json"
    path.write_text(path.read_text().replace("{", '{"generator": "other",', 1))
    with pytest.raises(EngineError, match="occurs twice in an object"):
        Engine.open(directory)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "1" + "0" * 400, "1" + "0" * 5000, "-" + "9" * 30])
@pytest.mark.parametrize("key", ["rope_theta", "sliding_window", "max_context", "size", "format_version"])
def test_a_number_that_is_none_is_refused(directory: Path, key: str, number: str) -> None:
    path = directory / "engine.json"
    text, count = re.subn(rf'("{key}": )[\d.]+', rf"\g<1>{number}", path.read_text(), count=1)
    assert count == 1
    path.write_text(text)
    with pytest.raises(EngineError, match=r"engine\.json cannot be read: it has the number "):
        Engine.open(directory)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_batch", 0), ("max_batch", 1025), ("max_context", -1), ("max_context", 1 << 40), ("prefill_chunk", 0)],
)
def test_limits_that_no_build_has_are_refused(directory: Path, limit: str, value: int) -> None:
    limits = json.loads((directory / "engine.json").read_text())["limits"]
    rewrite_manifest(directory, limits=limits | {limit: value})
    with pytest.raises(EngineError, match=rf"limits\.{limit}: "):
        Engine.open(directory)


def test_a_context_beyond_the_models_positions_is_refused(directory: Path) -> None:
    limits = json.loads((directory / "engine.json").read_text())["limits"]
    positions = Engine.open(directory).manifest.model.max_position_embeddings
    rewrite_manifest(directory, limits=limits | {"max_context": positions + 1})
    with pytest.raises(EngineError, match=rf"the model's positions end at {positions}"):
        Engine.open(directory)


def test_not_an_engine(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(EngineError, match="is not an engine"):
            Engine.open(path)


def test_unknown_field_is_refused(directory: Path) -> None:
    rewrite_manifest(directory, surprise=1)
    with pytest.raises(EngineError, match="surprise"):
        Engine.open(directory)
