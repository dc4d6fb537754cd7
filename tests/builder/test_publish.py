"""Publishing: all or nothing, one build at a time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flint_builder import publish
from flint_builder.publish import Staging
from flint_runtime.engine import Engine, read_manifest
from flint_runtime.errors import EngineError, UsageError
from flint_runtime.manifest import encode_manifest
from tests.manifests import manifest


def published(output: Path, generator: str, force: bool = False) -> None:
    with Staging(output, force) as staging:
        (staging.directory / "data").write_text(generator)
        staging.publish(manifest(generator=generator))


def generator_of(output: Path) -> str:
    return read_manifest(output).generator


def test_publish_creates_parents_and_leaves_only_the_engine(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "engine"
    published(output, "first")
    assert generator_of(output) == "first"
    assert [p.name for p in output.parent.iterdir()] == ["engine"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Staging(tmp_path / "engine", False) as staging:
        (staging.directory / "data").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_working_directory_never_opens(tmp_path: Path) -> None:
    with Staging(tmp_path / "engine", False) as staging:
        (staging.directory / "engine.json").write_bytes(encode_manifest(manifest()))
        with pytest.raises(EngineError, match="has not finished"):
            Engine.open(staging.directory)


def test_e6_existing_engine_is_refused_without_force(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    published(output, "first")
    with pytest.raises(UsageError, match="--force"), Staging(output, False):
        pass
    assert generator_of(output) == "first"


def test_e6_force_keeps_the_old_engine_until_the_new_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    published(output, "first")
    with Staging(output, True) as staging:
        assert generator_of(output) == "first"
        staging.publish(manifest(generator="second"))
        assert generator_of(output) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]
    with pytest.raises(RuntimeError), Staging(output, True):
        raise RuntimeError
    assert generator_of(output) == "second"


def test_e6_force_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot exchange two directories in one step."""
    monkeypatch.setattr(publish, "_RENAME_EXCHANGE", 1 << 30)  # flags the kernel answers with EINVAL
    output = tmp_path / "engine"
    published(output, "first")
    published(output, "second", force=True)
    assert generator_of(output) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_force_replaces_nothing_but_engines(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("x")
    with pytest.raises(UsageError, match="is not an engine"), Staging(tmp_path / "photos", True):
        pass
    assert (tmp_path / "photos" / "1.jpg").exists()


def test_e7_second_build_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with Staging(output, False) as first:
        with pytest.raises(UsageError, match="Another build"), Staging(output, False):
            pass
        assert first.directory.exists()
        first.publish(manifest(generator="first"))
    assert generator_of(output) == "first"


def test_e7_lock_ends_with_its_process(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    code = f"""
        import os, signal
        from pathlib import Path
        from flint_builder.publish import Staging
        with Staging(Path({str(output)!r}), False) as staging:
            (staging.directory / "half").mkdir()
            (staging.directory / "half" / "file").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert killed.returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == [".engine.building"]
    published(output, "second")
    assert sorted(p.name for p in output.iterdir()) == ["data", "engine.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_cleanup_spares_the_next_build(tmp_path: Path) -> None:
    """Between our publish and our clean-up another build may have taken the working directory."""
    output = tmp_path / "engine"
    with Staging(output, False) as first:
        first.publish(manifest(generator="first"))
        second = Staging(output, True).__enter__()
        (second.directory / "data").write_text("second")
    assert (second.directory / "data").exists()
    second.publish(manifest(generator="second"))
    second.__exit__(None, None, None)
    assert generator_of(output) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]
