"""Opening and verifying engine directories."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flint_runtime.engine import Engine, damaged_files
from flint_runtime.errors import EngineError
from flint_runtime.manifest import FileEntry
from tests.manifests import manifest

FILES = {"weights/a.safetensors": b"a" * 1000, "plans/decode.plan": b"plan", "libflint_plugins.so": b"ELF"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An engine directory with made-up files."""
    entries = []
    for name, data in FILES.items():
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries.append(FileEntry(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    (tmp_path / "engine" / "engine.json").write_text(manifest(files=tuple(entries)).model_dump_json())
    return tmp_path / "engine"


def problems(directory: Path) -> list[str]:
    done: list[int] = []
    found = list(damaged_files(directory, Engine.open(directory).manifest, done.append))
    assert sum(done) == sum(map(len, FILES.values()))
    return found


def change(directory: Path, **values: Any) -> None:
    path = directory / "engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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
    path = directory / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = problems(directory)
    assert len(found) == 1 and found[0].startswith(f"{name} has sha256")


def test_e4_missing_file_is_refused(directory: Path) -> None:
    (directory / "plans/decode.plan").unlink()
    with pytest.raises(EngineError, match=r"decode\.plan is missing"):
        Engine.open(directory)


def test_e8_engine_can_move(directory: Path, tmp_path: Path) -> None:
    moved = directory.rename(tmp_path / "elsewhere")
    assert Engine.open(moved).weight_paths()[0].exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format_version": 1}', "\xff"])
def test_broken_manifest(directory: Path, damage: str) -> None:
    (directory / "engine.json").write_text(damage, "latin-1")
    with pytest.raises(EngineError, match=r"engine\.json"):
        Engine.open(directory)


def test_other_format_or_layout(directory: Path) -> None:
    change(directory, format_version=99)
    with pytest.raises(EngineError, match=r"engine format 99, .*reads engine format 1 or 2"):
        Engine.open(directory)
    for readable in (1, 2):
        change(directory, format_version=readable)
        assert Engine.open(directory).manifest.format_version == readable
    change(directory, layout_version=99)
    with pytest.raises(EngineError, match="weight layout 99"):
        Engine.open(directory)


def test_not_an_engine(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(EngineError, match="is not an engine"):
            Engine.open(path)


def test_unknown_field_is_refused(directory: Path) -> None:
    change(directory, surprise=1)
    with pytest.raises(EngineError, match="surprise"):
        Engine.open(directory)
