"""Running a command line inside the test's process, through the boundary that the real one has."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import typer

from flint_runtime.command_line import run


@dataclass(frozen=True)
class Ended:
    """What a command line left."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(
    app: typer.Typer, program: str, *arguments: str | Path, stdin: bytes = b"", encoding: str = "utf-8"
) -> Ended:
    """Run to the end; `encoding` is that of all three standard streams."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding=encoding)
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "stdin", given):
        try:
            run(app, program, [str(a) for a in arguments])
        except SystemExit as ended:
            code = ended.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
    assert isinstance(code, int)
    return Ended(code, *texts)
