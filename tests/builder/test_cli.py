"""build-engine as a person or a script meets it: output, reports, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flint_builder.cli import app
from flint_runtime.engine import Engine
from tests.command_lines import Ended, invoke


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
        (["--hf-config", "/nowhere"], 2, "/nowhere is not a directory"),
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


def test_help_teaches() -> None:
    text = run("--help").stdout
    for word in ("GGUF", "--dry-run", "--force", "Example:", "Exit codes"):
        assert word in text
