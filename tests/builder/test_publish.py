"""Publishing: all or nothing, one build at a time, and nobody else's files touched."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flint_builder import output as output_module
from flint_builder import publish
from flint_builder.output import check_output
from flint_builder.publish import Staging
from flint_runtime.engine import Engine, read_manifest
from flint_runtime.errors import EngineError, UsageError
from flint_runtime.manifest import FileEntry, Manifest, encode_manifest
from tests.manifests import manifest
from tests.permissions import without_override

FILES = ("data", "weights/layer-00.safetensors")


def write(staging: Staging, generator: str) -> Manifest:
    for name in FILES:
        path = staging.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(generator)
    return manifest(generator=generator, files=tuple(FileEntry(path=name, size=1, blake3="0" * 64) for name in FILES))


def published(output: Path, generator: str, force: bool = False) -> None:
    with Staging(output, force) as staging:
        staging.publish(write(staging, generator))


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


@pytest.mark.parametrize("moment", ["between the renames", "before deleting", "while deleting", "after deleting"])
def test_killed_where_directories_cannot_be_exchanged(tmp_path: Path, moment: str) -> None:
    output, aside = tmp_path / "engine", tmp_path / ".engine.building.building"
    published(output, "old")
    output.rename(tmp_path / "old")
    if moment != "between the renames":
        published(output, "first")
    (tmp_path / "old").rename(aside)
    if moment == "while deleting":
        (aside / "data").unlink()
    if moment == "after deleting":
        output_module.delete_engine(aside)
    published(output, "second", force=True)
    assert generator_of(output) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_the_old_engine_is_put_back(tmp_path: Path) -> None:
    """The next build recovers it though it fails itself."""
    output = tmp_path / "engine"
    published(output, "old")
    output.rename(tmp_path / ".engine.building.building")
    with pytest.raises(UsageError, match="--force"), Staging(output, False):
        pass
    assert generator_of(output) == "old"


def tree(root: Path) -> dict[str, str | None]:
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_text() if p.is_file() else None
        for p in root.rglob("*")
    }


def test_link_as_output_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    """The case that emptied v1: a link, --force, twice."""
    published(tmp_path / "v1", "first")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "current"
    link.symlink_to("../v1")
    for generator in ("second", "third"):
        published(link, generator, force=True)
        assert generator_of(tmp_path / "v1") == generator_of(link) == generator
    assert os.readlink(link) == "../v1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "v1"]
    assert [p.name for p in link.parent.iterdir()] == ["current"]
    with pytest.raises(UsageError, match="already holds an engine"):
        check_output(link, False)


def test_link_that_leads_nowhere_yet(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("v1")
    published(tmp_path / "current", "first")
    assert generator_of(tmp_path / "v1") == "first" and (tmp_path / "current").is_symlink()


def test_link_to_somebodys_folder(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("x")
    (tmp_path / "engine").symlink_to("photos")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="is not an engine"), Staging(tmp_path / "engine", True):
        pass
    assert tree(tmp_path) == before


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()
    (path / "1.jpg").write_text("x")


def another_programs_manifest(text: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        folder(path)
        (path / "engine.json").write_text(text)

    return make


def manifest_that_is_a_link(path: Path) -> None:
    published(path.with_name("real"), "x")
    folder(path)
    (path / "engine.json").symlink_to("../real/engine.json")


STRANGE = {
    "file": lambda path: path.write_text("x"),
    "empty folder": Path.mkdir,
    "folder": folder,
    "pipe": os.mkfifo,
    "loop": loop,
    "a game's engine.json": another_programs_manifest('{"engine": "unreal", "files": ["1.jpg"]}'),
    "manifest without files": another_programs_manifest('{"format_version": 1}'),
    "manifest that is none": another_programs_manifest("engine"),
    "manifest that is a number": another_programs_manifest("1"),
    "deep manifest": another_programs_manifest("[" * 100_000),
    "manifest that is a link": manifest_that_is_a_link,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_force_replaces_nothing_but_engines(tmp_path: Path, kind: str) -> None:
    STRANGE[kind](tmp_path / "thing")  # type: ignore[no-untyped-call]
    names = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"is not an engine|Choose another directory"):
        published(tmp_path / "thing", "x", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    if kind not in ("file", "pipe", "empty folder", "loop"):
        assert (tmp_path / "thing" / "1.jpg").read_text() == "x"


@pytest.mark.parametrize("stray", ["notes.txt", "weights/mine.bin", "my/thing", "weights.bak/", "linked/", ".hidden"])
def test_force_refuses_an_engine_that_holds_anything_else(tmp_path: Path, stray: str) -> None:
    output = tmp_path / "engine"
    published(output, "first")
    path = output / stray
    if stray == "linked/":
        path.symlink_to(tmp_path)
    elif stray.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=f"holds more than its engine.json names: {stray.split('thing')[0]}"):
        published(output, "second", force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "data/../../outside", "outside", "a\0b", ""])
def test_a_manifest_cannot_name_what_is_outside(tmp_path: Path, path: str) -> None:
    """Replacing an engine whose manifest lies deletes nothing beside it."""
    output = tmp_path / "engine"
    (tmp_path / "outside").write_text("mine")
    published(output, "first")
    document = json.loads((output / "engine.json").read_text())
    document["files"].append({"path": path, "size": 1, "blake3": "0" * 64})
    (output / "engine.json").write_text(json.dumps(document))
    published(output, "second", force=True)
    assert (tmp_path / "outside").read_text() == "mine" and Path("/etc/hostname").exists()
    assert generator_of(output) == "second"


@pytest.mark.parametrize("change", ["format", "missing file", "linked file", "read-only"])
def test_force_replaces_old_and_damaged_engines(tmp_path: Path, change: str) -> None:
    output = tmp_path / "engine"
    published(output, "first")
    (tmp_path / "store").write_text("mine")
    if change == "format":
        text = (output / "engine.json").read_text()
        (output / "engine.json").write_text(text.replace('"format_version": 3', '"format_version": 0, "new": {}'))
    elif change == "missing file":
        (output / "data").unlink()
    elif change == "linked file":
        (output / "data").unlink()
        (output / "data").symlink_to("../store")
    else:
        for directory in (output / "weights", output):
            directory.chmod(0o555)
    with without_override():
        published(output, "second", force=True)
    assert generator_of(output) == "second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine", "store"]
    assert (tmp_path / "store").read_text() == "mine"


def link_to_somebodys_folder(path: Path) -> None:
    folder(path.with_name("photos"))
    path.symlink_to("photos")


def folder_with_a_link_as_marker(path: Path) -> None:
    folder(path)
    (path / ".flint-building").symlink_to("1.jpg")


def engine_with_a_stray(path: Path) -> None:
    published(path.with_name("new"), "x")
    path.with_name("new").rename(path)
    (path / "notes").write_text("x")


IN_THE_WAY: dict[str, Callable[[Path], Any]] = {
    "link": link_to_somebodys_folder,
    "link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "file": lambda path: path.write_text("x"),
    "pipe": os.mkfifo,
    "folder": folder,
    "marker that is a link": folder_with_a_link_as_marker,
    "engine with a stray": engine_with_a_stray,
}


@pytest.mark.parametrize("name", [".engine.building", ".engine.building.building"])
@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_what_is_not_ours_is_neither_followed_nor_emptied(tmp_path: Path, kind: str, name: str) -> None:
    published(tmp_path / "engine", "first")
    IN_THE_WAY[kind](tmp_path / name)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=f"{name} is in the way"):
        published(tmp_path / "engine", "second", force=True)
    after = sorted(str(p) for p in tmp_path.rglob("*"))
    assert [p for p in after if not p.endswith("/.engine.building") or p in before] == before
    assert generator_of(tmp_path / "engine") == "first"
    published(tmp_path / "other", "works")


@pytest.mark.parametrize("leftover", ["empty", "half", "whole engine", "marker only"])
def test_what_a_killed_build_left_is_emptied(tmp_path: Path, leftover: str) -> None:
    output, left = tmp_path / "engine", tmp_path / ".engine.building"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "1.jpg").write_text("x")
    if leftover == "whole engine":
        published(tmp_path / "new", "x")
        (tmp_path / "new").rename(left)
    else:
        left.mkdir()
        if leftover != "empty":
            (left / ".flint-building").write_text("")
        if leftover == "half":
            (left / "weights").mkdir()
            (left / "weights" / "half").write_text("x")
            (left / "link").symlink_to("../outside")
    published(output, "first")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine", "outside"]
    assert sorted(p.name for p in output.iterdir()) == ["data", "engine.json", "weights"]
    assert (tmp_path / "outside" / "1.jpg").exists()


def test_file_put_into_the_old_engine_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind the last check: the exchange takes it along, and it is kept."""
    output = tmp_path / "engine"
    published(output, "first")
    real = Staging._exchange

    def exchange(staging: Staging) -> None:
        (output / "notes").write_text("mine")
        real(staging)

    monkeypatch.setattr(Staging, "_exchange", exchange)
    published(output, "second", force=True)
    assert generator_of(output) == "second"
    assert tree(tmp_path / ".engine.building") == {"notes": "mine"}
    assert ".engine.building" in capsys.readouterr().err


def test_interrupted_right_behind_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "engine"
    published(output, "first")
    real = Staging._exchange

    def exchange(staging: Staging) -> None:
        real(staging)
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "_exchange", exchange)
    with pytest.raises(KeyboardInterrupt):
        published(output, "second", force=True)
    assert generator_of(output) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV, errno.EACCES])
def test_exchange_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A bind mount is found out only here."""
    output = tmp_path / "engine"
    published(output, "first")

    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def renameat2(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    with pytest.raises(OSError, match=os.strerror(code)):
        published(output, "second", force=True)
    assert generator_of(output) == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def unwritable(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o555)
    return path / "engine"


def unsearchable(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o000)
    return path / "engine"


def below_a_file(path: Path) -> Path:
    path.write_text("x")
    return path / "engine"


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "staging name": (lambda path: path / "engine.building", "Choose another name"),
    "hidden staging name": (lambda path: path / ".engine.building", "Choose another name"),
    "long name": (lambda path: path.parent / ("x" * 300), "has 300 bytes, at most 2.."),
    "long name in a new folder": (lambda path: path / "new" / ("x" * 300), "has 300 bytes"),
    "name that leaves no room for ours": (lambda path: path / ("ä" * 120), "has 240 bytes, at most 236"),
    "long folder": (lambda path: path / ("x" * 300) / "engine", r"File name too long|has 300 bytes"),
    "long path": (lambda path: Path(str(path) + "/x" * 4000), "File name too long"),
    "below a file": (below_a_file, "not a directory|Not a directory"),
    "far below a file": (lambda path: below_a_file(path) / "a" / "b", "Not a directory"),
    "unwritable": (unwritable, "read-only, or not yours"),
    "below an unsearchable folder": (lambda path: unsearchable(path) / "below", "Permission denied"),
    "unsearchable": (unsearchable, "not yours to write"),
    "mount point": (lambda path: Path("/proc"), "mount point"),
    "root": (lambda path: Path("/"), "mount point"),
    "kernel's folder": (lambda path: Path("/proc/engine"), "proc"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_places_that_cannot_be_written_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    make, message = PLACES[kind]
    output = make(tmp_path / "place")
    with without_override(), pytest.raises(UsageError, match=message):
        published(output, "x")
    if output.parent != Path("/proc") and output != Path("/proc") and output != Path("/"):
        assert [p.name for p in tmp_path.iterdir()] in ([], ["place"])


def test_bind_mount_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes a space as \\040."""
    output = tmp_path / "an engine"
    published(output, "first")
    mounts = f"36 35 98:0 / {str(output).replace(' ', chr(92) + '040')} rw - ext4 /dev/root rw\n"
    (tmp_path / "mountinfo").write_text(mounts)
    real = open
    monkeypatch.setattr(
        output_module,
        "open",
        lambda path, mode: real(tmp_path / "mountinfo" if path == "/proc/self/mountinfo" else path, mode),
        raising=False,
    )
    with pytest.raises(UsageError, match="is a mount point"):
        check_output(output, True)


def test_output_with_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    output = tmp_path / os.fsdecode(b"caf\xe9")
    published(output, "first")
    published(output, "second", force=True)
    assert generator_of(output) == "second"
    with pytest.raises(UsageError) as caught:
        check_output(output, False)
    assert "caf\\xe9 already holds" in str(caught.value)


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
    assert sorted(p.name for p in output.iterdir()) == ["data", "engine.json", "weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_cleanup_spares_the_next_build(tmp_path: Path) -> None:
    """Between our publish and our clean-up another build may have taken the working directory."""
    output = tmp_path / "engine"
    with Staging(output, False) as first:
        first.publish(manifest(generator="first"))
        second = Staging(output, True).__enter__()
        new = write(second, "second")
    assert (second.directory / "data").exists()
    second.publish(new)
    second.__exit__(None, None, None)
    assert generator_of(output) == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["engine"]
