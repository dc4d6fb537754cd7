"""run-engine as a person or a script meets it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flint_builder.build import BuildOptions, build_engine, plan_build
from flint_runtime import cli, console
from flint_runtime.cli import app
from flint_runtime.errors import printable
from flint_runtime.llm import LLM
from flint_runtime.sampling_params import SamplingParams
from tests.command_lines import Ended, invoke
from tests.permissions import without_override
from tests.runtime.engines import rewrite_manifest


@pytest.fixture(scope="module")
def engine(random_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "nano"
    build_engine(
        plan_build(
            BuildOptions(
                str(random_nano),
                ("sm120",),
                output,
                backend="plugin-host",
                weights="nvfp4",
                max_context=512,
                prefill_chunk=64,
            )
        )
    )
    return output


def run(*arguments: str | Path, stdin: str | bytes = "", encoding: str = "utf-8") -> Ended:
    given = stdin if isinstance(stdin, bytes) else stdin.encode()
    return invoke(app, "run-engine", *arguments, stdin=given, encoding=encoding)


def run_process(*arguments: str | Path | bytes, **options: Any) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'run-engine'; from flint_runtime.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options)


def test_inspect(engine: Path) -> None:
    shown = run_process("inspect", engine)
    assert shown.returncode == 0, shown.stderr
    for part in ("plugin-host, for sm120", "6 layers (3 full, 3 sliding with window 33)", "512 tokens of context"):
        assert part in " ".join(shown.stdout.split())
    report = json.loads(run("inspect", engine, "--json").stdout)
    assert report["targets"] == ["sm120"] and report["gpu_memory"]["context"] == 512
    assert report["bytes"] == sum(report["files"].values())


def test_verify(engine: Path) -> None:
    shown = run_process("verify", engine)
    assert shown.returncode == 0 and "all as built" in shown.stdout, shown.stderr
    assert json.loads(run("verify", engine, "--json").stdout) == {"engine": str(engine), "ok": True, "problems": []}


@pytest.mark.parametrize("name", ["weights/layer-03.safetensors", "libflint_plugins.so", "graph/decode.onnx"])
def test_e4_verify_names_the_damaged_file(engine: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 3] ^= 4
    (copy / name).write_bytes(data)
    shown = run_process("verify", copy)
    assert shown.returncode == 4
    assert f"{name} has blake3" in shown.stderr
    report = json.loads(run("verify", copy, "--json").stdout)
    assert not report["ok"] and len(report["problems"]) == 1
    assert report["exit_code"] == 4 and report["problems"][0] in report["error"]


def test_e5_library_of_another_version(engine: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    rewrite_manifest(copy, plugins_version="9.9.9")
    shown = run_process("verify", copy)
    assert shown.returncode == 4
    assert "libflint_plugins.so is version" in shown.stderr and "9.9.9" in shown.stderr


def test_verify_reports_a_changed_manifest(engine: Path, tmp_path: Path) -> None:
    """With its old digest, and where the digest was made to fit."""
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    path = copy / "engine.json"
    document = json.loads(path.read_text())
    document["model"]["rope_theta"] = 500000.0
    path.write_text(json.dumps(document))
    shown = run_process("verify", copy)
    assert shown.returncode == 4 and "engine.json was changed after the build" in shown.stderr
    rewrite_manifest(copy)
    shown = run_process("verify", copy)
    assert shown.returncode == 4 and "of the RoPE table is not that of rope_theta 500000.0" in shown.stderr


def test_generate_streams_text(engine: Path) -> None:
    shown = run("generate", engine, "Hello", "--executor", "reference", "--max-tokens", "8", "--seed", "1")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("<think>")
    report = run("generate", engine, "-", "--max-tokens", "8", "--seed", "1", "--json", stdin="Hello")
    assert json.loads(report.stdout)["text"] == shown.stdout.removesuffix("\n")
    assert "stopped at the token limit" in shown.stderr or len(json.loads(report.stdout)["token_ids"]) <= 8


def test_generate_raw_is_greedy_at_temperature_zero(engine: Path) -> None:
    arguments = ("generate", engine, "some text", "--raw", "--temperature", "0", "--max-tokens", "5", "--json")
    first, second = (json.loads(run(*arguments).stdout) for _ in range(2))
    assert first == second and first["prompt"] == "some text"


def test_chat_remembers(engine: Path) -> None:
    """Each turn is the answer to the whole conversation; blank lines are no turns, and /exit ends it."""
    options = ("--executor", "reference", "--temperature", "0", "--max-tokens", "6", "--no-thinking")
    shown = run("chat", engine, *options, stdin="Hello\n\nAgain\n/exit\nNever\n")
    assert shown.exit_code == 0, shown.stderr
    expected, history = [], []
    with LLM(engine, "reference") as llm:
        for message in ("Hello", "Again"):
            history.append({"role": "user", "content": message})
            params, quick = SamplingParams(temperature=0, max_tokens=6), {"enable_thinking": False}
            (output,) = llm.chat(history, params, chat_template_kwargs=quick, use_tqdm=False)
            expected.append(output.outputs[0].text)
            history.append({"role": "assistant", "content": expected[-1]})
    assert shown.stdout == "".join(text + "\n" for text in expected)


def test_a_conversation_that_outgrows_the_context(engine: Path) -> None:
    shown = run("chat", engine, "--max-tokens", "500", stdin="Hello " * 600)
    assert shown.exit_code == 2 and "context is 512 tokens" in " ".join(shown.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "ENGINE", ""], 2, "prompt is empty"),
        (["generate", "ENGINE", "x " * 600], 2, "context is 512 tokens"),
        (["generate", "ENGINE", "x", "--max-tokens", "0"], 2, "max_tokens must be"),
        (["generate", "ENGINE", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "ENGINE", "x", "--executor", "magic"], 2, "Invalid value"),
        (["inspect", "/nowhere"], 4, "is not an engine"),
        (["verify", "/nowhere"], 4, "is not an engine"),
    ],
)
def test_errors(engine: Path, arguments: list[str], code: int, message: str) -> None:
    shown = run(*[str(engine) if a == "ENGINE" else a for a in arguments])
    assert shown.exit_code == code, shown.stderr
    assert message in " ".join(shown.stderr.split())


def test_prompts_that_are_not_utf8(engine: Path) -> None:
    """As an argument, from standard input, in a conversation."""
    argument = os.fsdecode(b"ab\xff")
    for ended in (
        run("generate", engine, argument),
        run("generate", engine, "-", stdin=b"ab\xff"),
        run("chat", engine, stdin=b"ab\xff\n"),
    ):
        assert ended.exit_code == 2 and ended.stdout == ""
        assert "cannot be read: it is not utf-8, byte 0xff at offset 2. Convert it" in ended.stderr
    shown = run_process("generate", engine, b"ab\xff")
    assert shown.returncode == 2 and "byte 0xff at offset 2" in shown.stderr and len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_for_every_locale(engine: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """The prompt is UTF-8 whatever the locale; what it cannot print of an answer is escaped, a report is ASCII."""
    arguments = ("generate", engine, "-", "--raw", "--temperature", "0", "--max-tokens", "3", "--executor", "reference")
    monkeypatch.setattr(cli, "stream", lambda text: console.stream(text and "é中"))
    shown = run(*arguments, stdin="é中", encoding=encoding)
    assert shown.exit_code == 0, shown.stderr
    assert "é中".encode(encoding, "backslashreplace").decode(encoding) in shown.stdout
    report = run(*arguments, "--json", stdin="é中", encoding=encoding)
    assert report.stdout.isascii() and json.loads(report.stdout)["prompt"] == "é中"


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_answers_do_not_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\n\tb\x1b[2J\x07\r\x9b é 👩\u200d💻"
    for stdout, expected in ((Terminal(), "a\n\tb\\x1b[2J\\x07\\r\\x9b é 👩\u200d💻"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stdout)
        console.stream(text)
        assert stdout.getvalue() == expected


@pytest.mark.parametrize(
    "name", ["a[/x][red]b", "a\x1b[31m\nb", os.fsdecode(b"caf\xe9")], ids=["markup", "escape", "byte"]
)
def test_engines_with_strange_names(engine: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / name
    shutil.copytree(engine, copy)
    shown = run("inspect", copy, encoding="ascii")
    assert shown.exit_code == 0 and printable(name) in "".join(shown.stdout.split())
    assert json.loads(run("inspect", copy, "--json").stdout)["engine"] == str(copy)
    (copy / "tokenizer.json").unlink()
    for command in (["inspect"], ["verify"], ["generate", "x"]):
        ended = run(command[0], copy, *command[1:])
        assert ended.exit_code == 4
        assert printable(name) in ended.stderr and "tokenizer.json is missing" in ended.stderr


def test_foreign_text_in_an_engine(engine: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    raw = json.loads((copy / "engine.json").read_text())
    raw["generator"] = "[/x]\x1b[2J"
    (copy / "engine.json").write_text(json.dumps(raw))
    ended = run("inspect", copy)
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "[/x]\\x1b[2J" in ended.stdout or ended.exit_code == 4  # shown as it is, or refused as changed


def test_unreadable_is_not_missing(engine: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    for path in (copy / "engine.json", copy / "tokenizer.json", copy):
        mode = path.stat().st_mode
        path.chmod(0)
        with without_override():
            ended = run("verify", copy)
        path.chmod(mode)
        assert ended.exit_code == 4 and "Permission denied" in ended.stderr, (path, ended.stderr)
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("place", ["x" * 300, "file/engine", "loop"])
def test_engine_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for command in (["inspect"], ["verify"], ["generate", "x"], ["chat"]):
        ended = run(command[0], place, *command[1:])
        assert ended.exit_code == 4 and len(ended.stderr.splitlines()) == 1, ended.stderr
        assert len(ended.stderr) <= 1001


def test_closed_standard_input(engine: Path) -> None:
    shown = run_process("generate", engine, "-", preexec_fn=lambda: os.close(0))
    assert shown.returncode == 2 and "Standard input is closed" in shown.stderr


@pytest.mark.parametrize("command", ["", "inspect", "verify", "generate", "chat"])
def test_help_at_80_columns(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*command.split(), "--help")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 50


def test_import_is_light() -> None:
    """The package alone imports neither torch nor onnx."""
    code = "import sys, flint_runtime; print([m for m in ('torch', 'onnx', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
