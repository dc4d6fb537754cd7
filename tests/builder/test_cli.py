"""build-engine as a person or a script meets it: output, reports, exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from flint_builder import build as build_module
from flint_builder.cli import app
from flint_runtime.engine import Engine
from flint_runtime.errors import CheckpointError, printable
from tests.command_lines import Ended, invoke
from tests.permissions import without_override


def run(*arguments: str | Path, encoding: str = "utf-8") -> Ended:
    return invoke(app, "build-engine", *arguments, encoding=encoding)


@pytest.fixture
def build_arguments(random_nano: Path, tmp_path: Path) -> list[str | Path]:
    return [random_nano, "--weights", "nvfp4", "--backend", "plugin-host", "-o", tmp_path / "e"]


def test_builds_and_says_so(build_arguments: list[str | Path], tmp_path: Path) -> None:
    result = run(*build_arguments)
    assert result.exit_code == 0, result.stderr
    assert f"Built {tmp_path / 'e'}" in result.stdout
    assert "run-engine generate" in result.stdout
    assert "weights:" in result.stderr
    Engine.open(tmp_path / "e")


def test_json_report_is_all_of_stdout(build_arguments: list[str | Path], tmp_path: Path) -> None:
    report = json.loads(run(*build_arguments, "--json").stdout)
    assert report["engine"] == str(tmp_path / "e")
    assert report["weights"] == "nvfp4" and report["targets"] == ["sm120"]
    assert report["bytes"] == sum(entry.size for entry in Engine.open(tmp_path / "e").manifest.files)
    assert set(report["seconds"]) == {"graph", "weights", "publish"}
    assert report["notes"]["tensors_without_scale"] == 0


def test_dry_run_writes_nothing(build_arguments: list[str | Path], tmp_path: Path) -> None:
    result = run(*build_arguments, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "Would build" in result.stdout and "RTX 5090" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_report(build_arguments: list[str | Path]) -> None:
    report = json.loads(run(*build_arguments, "--dry-run", "--json", "--max-context", "2048").stdout)
    rows = report["gpu_memory"]
    assert [row["context"] for row in rows] == [1024, 2048]
    for row in rows:
        parts = sum(size for name, size in row.items() if name not in ("context", "total"))
        assert parts == row["total"]
    assert all(gpu["largest_context"] == 2048 for gpu in report["gpus"])


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["--target", "rtx5090"], 2, "expected GPU architectures such as sm120"),
        (["--target", "sm75"], 4, "not for sm75"),
        (["--max-batch", "0"], 2, "--max-batch 0 is out of range"),
        (["--max-context", "999999"], 2, "--max-context 999999"),
        (["--hf-config", "/nowhere"], 2, "--hf-config /nowhere does not exist"),
        (["--weights", "fp8"], 2, "Invalid value"),
        (["--backend", "tensorrt"], 4, "pip install 'flint-tensorrt[tensorrt]'"),
    ],
)
def test_errors(build_arguments: list[str | Path], changes: list[str], code: int, message: str, tmp_path: Path) -> None:
    result = run(*build_arguments, *changes)
    assert result.exit_code == code, result.stderr
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_error_has_exit_code_three(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / "empty", "-o", tmp_path / "e")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "e").exists()


def test_error_in_json(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing.gguf", "-o", tmp_path / "e", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["exit_code"] == 2
    assert "nothing.gguf does not exist" in json.loads(result.stdout)["error"]


def test_missing_checkpoint_argument() -> None:
    assert run().exit_code == 2


def test_help_teaches_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--help").stdout
    for word in ("GGUF", "--dry-run", "--force", "Example:", "Exit codes", "auto|tensorrt|tensorrt-rtx|plugin-host"):
        assert word in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    explained = [line for line in lines if line.startswith(" " * 34)]
    assert explained and len(lines) <= 60, "the explanations stand in a narrow column"


def test_every_error_has_a_report(build_arguments: list[str | Path], tmp_path: Path) -> None:
    """Those that are found before anything is opened, too."""
    for changes, code in ((["--target", "x"], 2), (["--nonsense"], 2), (["--hf-config", tmp_path], 3)):
        ended = run(*build_arguments, *changes, "--json")
        report = json.loads(ended.stdout)
        assert ended.exit_code == report["exit_code"] == code
        assert f"error: {report['error']}" in ended.stderr


def strange_outputs(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / ".taken.building").write_text("x")
    return {
        "too long": tmp_path / ("x" * 300),
        "below a file": tmp_path / "file" / "e",
        "a file": tmp_path / "file",
        "working name": tmp_path / "e.building",
        "loop": tmp_path / "loop",
        "taken": tmp_path / "taken",
    }


@pytest.mark.parametrize("kind", ["too long", "below a file", "a file", "working name", "loop", "taken"])
def test_outputs_that_cannot_be(random_nano: Path, tmp_path: Path, kind: str) -> None:
    output = strange_outputs(tmp_path)[kind]
    before = sorted(tmp_path.rglob("*"))
    ended = run(random_nano, "--weights", "nvfp4", "--backend", "plugin-host", "-o", output, "--force")
    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith("error: ") and len(ended.stderr) <= 1001
    assert sorted(tmp_path.rglob("*")) == before


STRANGE_NAMES = {
    "markup": "a[/x][red]b:smile:",
    "control characters": "a\x1b[31m\nb\u202e",
    "not UTF-8": os.fsdecode(b"caf\xe9"),
    "other letters": "中文 é",
}


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("name", STRANGE_NAMES.values(), ids=STRANGE_NAMES)
def test_strange_names_are_shown_and_built(random_nano: Path, tmp_path: Path, name: str, encoding: str) -> None:
    """As output and as checkpoint, in messages and in reports."""
    checkpoint = tmp_path / "checkpoints" / name
    shutil.copytree(random_nano, checkpoint)
    arguments = [checkpoint, "--weights", "nvfp4", "--backend", "plugin-host", "-o", tmp_path / name]
    shown = printable(name).encode(encoding, "backslashreplace").decode(encoding)
    built = run(*arguments, encoding=encoding)
    assert built.exit_code == 0, built.stderr
    assert f"Built {tmp_path / shown}: " in built.stdout
    source = Engine.open(tmp_path / name).manifest.notes["source"]
    assert source == f"{tmp_path}/checkpoints/{printable(name)}/nano.gguf"
    refused = run(*arguments, "--json", encoding=encoding)
    assert refused.exit_code == 2 and f"{shown} already holds an engine" in refused.stderr
    assert f"{printable(name)} already holds" in json.loads(refused.stdout)["error"]
    planned = run(*arguments, "--force", "--dry-run", encoding=encoding)
    assert planned.exit_code == 0 and f"Would build {tmp_path / shown} from " in planned.stdout
    report = json.loads(run(*arguments, "--force", "--dry-run", "--json", encoding=encoding).stdout)
    assert report["output"] == str(tmp_path / name)


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        ("x" * 300, 3, "File name too long"),
        ("nowhere.gguf", 2, "does not exist"),
        ("[/x].gguf", 2, "[/x].gguf does not exist"),
        ("loop", 3, "Too many levels of symbolic links"),
        ("dangling", 2, "leads to nowhere, which does not exist"),
        ("locked/model.gguf", 3, "Permission denied"),
        ("locked", 3, "Permission denied"),
        ("pipe.gguf", 3, "not a regular file"),
    ],
)
def test_checkpoints_that_cannot_be(
    random_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "locked").mkdir(mode=0)
    os.mkfifo(tmp_path / "pipe.gguf")
    with without_override():
        ended = run(spec, "-o", "e", "--hf-config", random_nano)
    assert ended.exit_code == code, ended.stderr
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_trouble_in_the_midst_of_a_build(
    build_arguments: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong in the midst of a build: its exit code, one paragraph, nothing left, bugs with a traceback."""
    for trouble, code in (
        (OSError(errno.EIO, "Input/output error"), 2),
        (OSError(errno.ENOSPC, "No space left on device"), 5),
        (MemoryError(), 5),
        (CheckpointError("wrong"), 3),
        (KeyboardInterrupt(), 130),
        (KeyError("x"), 1),
    ):

        def write(*_: object, trouble: BaseException = trouble) -> None:
            raise trouble

        monkeypatch.setattr(build_module, "write_weights", write)
        ended = run(*build_arguments, "--json")
        assert ended.exit_code == json.loads(ended.stdout)["exit_code"] == code
        assert ("Traceback" in ended.stderr) == (code == 1)
        assert code == 1 or len(ended.stderr.splitlines()) == 1
        assert list(tmp_path.iterdir()) == []
