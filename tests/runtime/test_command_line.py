"""The boundary: whatever happens inside a command ends as one paragraph and one exit code."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
import typer

from flint_runtime.command_line import Terminated
from flint_runtime.errors import (
    CheckpointError,
    EngineDeadError,
    EngineError,
    FlintError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from tests.command_lines import Ended, invoke

TROUBLE: dict[str, tuple[BaseException, int, str]] = {
    "usage": (UsageError("wrong"), 2, "wrong"),
    "checkpoint": (CheckpointError("wrong"), 3, "wrong"),
    "unsupported": (UnsupportedError("wrong"), 4, "wrong"),
    "engine": (EngineError("wrong"), 4, "wrong"),
    "resource": (ResourceError("wrong"), 5, "wrong"),
    "dead": (EngineDeadError("wrong"), 1, "wrong"),
    "markup": (UsageError("[/x] [red]x[/red] :smile:"), 2, "[/x] [red]x[/red] :smile:"),
    "control characters": (UsageError("a\x1b[2Jb\nc"), 2, "a\\x1b[2Jb\\nc"),
    "system": (PermissionError(13, "Permission denied", "/a"), 2, "program could not go on: Permission denied (/a)."),
    "disk": (OSError(28, "No space left on device"), 5, "No space left on device"),
    "memory": (MemoryError(), 5, "host memory ran out"),
    "depth": (RecursionError(), 2, "nested too deeply"),
    "text": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), 2, "byte 0xff at offset 0"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "Interrupted."),
    "SIGTERM": (Terminated(), 143, "Terminated by SIGTERM."),
    "bug": (KeyError("x"), 1, "This is a bug of program: KeyError: 'x'."),
    "typer": (typer.BadParameter("no"), 2, "Invalid value: no. See program --help."),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def command(
    kind: str, number: int = 0, as_json: Annotated[bool, typer.Option("--json")] = False, path: Path = Path()
) -> None:
    """A command that goes wrong as it is told."""
    if kind in TROUBLE:
        raise TROUBLE[kind][0]
    print(f"done {kind}")


def run(*arguments: str, encoding: str = "utf-8") -> Ended:
    return invoke(app, "program", *arguments, encoding=encoding)


def test_done() -> None:
    assert run("well") == Ended(0, "done well\n", "")
    assert run("--help").exit_code == 0


@pytest.mark.parametrize("kind", TROUBLE)
def test_trouble_is_a_paragraph_and_an_exit_code(kind: str) -> None:
    _, code, message = TROUBLE[kind]
    ended = run(kind)
    assert ended.exit_code == code and ended.stdout == ""
    *above, last = ended.stderr.splitlines()
    assert last.startswith("error: ") and message in last
    assert bool(above) == ("Traceback" in ended.stderr) == (kind == "bug")


@pytest.mark.parametrize("kind", TROUBLE)
def test_trouble_is_a_report_with_json(kind: str) -> None:
    _, code, message = TROUBLE[kind]
    ended = run(kind, "--json")
    report = json.loads(ended.stdout)
    assert ended.exit_code == report["exit_code"] == code
    assert message in report["error"] and f"error: {report['error']}" in ended.stderr


def test_details_are_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TROUBLE, "usage", (EngineError("damaged", ok=False, problems=["a"]), 4, ""))
    expected = {"error": "damaged", "exit_code": 4, "ok": False, "problems": ["a"]}
    assert json.loads(run("usage", "--json").stdout) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["x", "y"], "unexpected extra argument"),
        (["x", "--nonsense"], "No such option: --nonsense"),
        (["x", "[/x]\x1b"], "[/x]\\x1b"),
        (["x", "--number", "[/x]\x1b"], "Invalid value for '--number'"),
        (["x", "--number", "9" * 5000], "--number"),
        (["x", "--number"], "requires an argument"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2 and ended.stdout == ""
    assert message in ended.stderr and ended.stderr.endswith(" See program --help.\n")
    assert len(ended.stderr.splitlines()) == 1 and len(ended.stderr) <= 1001
    assert json.loads(run(*arguments[:1], "--json", *arguments[1:]).stdout)["exit_code"] == 2


def test_json_behind_a_double_dash_is_no_option() -> None:
    assert run("--", "--json").stdout == "done --json\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_locale_can_print_everything(encoding: str) -> None:
    name = "é中" + os.fsdecode(b"\xff")
    ended = run(name, encoding=encoding)
    assert ended.exit_code == 0 and ended.stdout.startswith("done ")
    with_error = run("x", name, "--json", encoding=encoding)
    assert with_error.exit_code == 2 and "\\xff" in with_error.stderr
    assert "é中\\xff" in json.loads(with_error.stdout)["error"]


PROGRAM = """
    import os, sys, time
    import typer
    from flint_runtime.command_line import raise_at_sigterm, run
    from flint_runtime.console import err, out, print_json

    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    def command(kind: str) -> None:
        raise_at_sigterm()
        if kind == "wait":
            print("ready", flush=True)
            try:
                time.sleep(30)
            finally:
                err.print("cleaned")
        elif kind == "rich":
            out.print("x" * 100_000)
        elif kind == "noise":
            err.print("x" * 100_000)
        elif kind == "memory":
            bytearray(1 << 40)
        else:
            print(kind)

    run(app, "program")
"""


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    """The program; it hears of Ctrl-C even where a shell started these tests in the background."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    values: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heard} | options
    return subprocess.Popen(command, **values)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_clean_up(number: int, code: int) -> None:
    program = start("wait")
    assert program.stdout
    assert program.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    program.send_signal(number)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == code
    first, last = errors.decode().splitlines()
    assert first == "cleaned" and last in ("error: Interrupted.", "error: Terminated by SIGTERM.")


@pytest.mark.parametrize(("kind", "stream"), [("short", "stdout"), ("rich", "stdout"), ("noise", "stderr")])
def test_reader_that_left(kind: str, stream: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = start(kind, **{stream: writing})
    os.close(writing)
    output, errors = program.communicate(timeout=60)
    assert program.returncode == 141 and not (output or b"") and not (errors or b"")


def test_full_disk_behind_standard_output() -> None:
    for kind in ("short", "rich"):
        with open("/dev/full", "wb") as full:
            program = start(kind, stdout=full)
        _, errors = program.communicate(timeout=60)
        assert program.returncode == 5, errors
        assert len(errors.splitlines()) == 1 and b"No space left on device" in errors


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    for kind, code in (("short", 0), ("rich", 0), ("noise", 0), ("--nonsense", 2)):
        line = f'"$0" -c "$1" {kind} {closed} >/dev/null' if ">" not in closed else f'"$0" -c "$1" {kind} {closed}'
        ended = subprocess.run(["sh", "-c", line, sys.executable, textwrap.dedent(PROGRAM)], capture_output=True)
        assert ended.returncode == code, (kind, ended.stderr)


def test_memory_runs_out() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    program = start("memory", preexec_fn=limit)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 5 and b"host memory ran out" in errors and len(errors.splitlines()) == 1


def test_an_error_of_ours_that_is_none_of_these_is_a_bug() -> None:
    assert FlintError.exit_code == 1
