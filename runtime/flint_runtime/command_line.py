"""The boundary of both command lines: whatever happens inside ends as one paragraph and one exit code.

    what happened                                              code
    done                                                       0
    an argument, or a place to write, is wrong                 2  UsageError
    the checkpoint is wrong or cannot be read                  3  CheckpointError
    engine, target or backend is wrong or cannot be read       4  UnsupportedError, EngineError
    disk, memory, open files ran out                           5  ResourceError
    Ctrl-C, a reader that left (as in `| head`), SIGTERM       130, 141, 143
    anything else is a bug of ours, and has a traceback        1

With --json, an error is a report, too: {"error": …, "exit_code": …} and the error's details.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NoReturn, TextIO

import typer

from flint_runtime.console import err, print_json
from flint_runtime.errors import FOREIGN_ERRORS, FlintError, UsageError, foreign_error

# typer brings its own copy of click, or needs click, depending on its version.
_ClickUsageError: type[Exception] = typer.BadParameter.__bases__[0]


class Terminated(BaseException):
    """SIGTERM: raised in the main thread, so that everything open is closed and cleaned up."""


def raise_at_sigterm() -> None:
    """Let SIGTERM unwind the program as Ctrl-C does."""

    def handle(number: int, frame: object) -> NoReturn:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)


def run(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and leave the process with its exit code.

    Args:
        program: its name, for messages.
        arguments: without the program's name; those of this process by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in takewhile(lambda argument: argument != "--", given)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # what an ASCII locale or a broken name cannot print
    try:
        code = _call(app, program, given)
        _flush(sys.stdout)
    except SystemExit:
        raise
    except BrokenPipeError:  # Nobody reads on, so there is nobody to tell.
        code = 128 + signal.SIGPIPE
        _abandon(sys.stdout)
        _abandon(sys.stderr)
    except BaseException as error:
        failure, code = _explained(error, program)
        _report(failure, code, as_json)
    sys.exit(code)


def _call(app: typer.Typer, program: str, arguments: list[str]) -> int:
    """Parse and run, without what typer itself does about errors. Returns the exit code."""
    command = typer.main.get_command(app)
    try:
        with command.make_context(program, arguments) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except _ClickUsageError as error:
        found: Any = error
        where = found.ctx.command_path if found.ctx else program
        raise UsageError(f"{found.format_message().rstrip('.')}. See {where} --help.") from None
    return 0


def _explained(error: BaseException, program: str) -> tuple[FlintError, int]:
    """What to tell of an error, and its exit code. A bug's traceback is printed here."""
    if isinstance(error, FlintError):
        return error, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return FlintError("Interrupted."), 128 + signal.SIGINT
    if isinstance(error, Terminated):
        return FlintError("Terminated by SIGTERM."), 128 + signal.SIGTERM
    if isinstance(error, FOREIGN_ERRORS):
        advice = "Check the paths and what they lead to."
        found = foreign_error(error, f"{program} could not go on", UsageError, advice)
        return found, found.exit_code
    with suppress(OSError, ValueError):
        traceback.print_exception(error)
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return FlintError(f"This is a bug of {program}: {reason}. Please report it with the lines above."), 1


def _report(error: FlintError, code: int, as_json: bool) -> None:
    """Print an error as a paragraph on stderr and, where one was asked for, as a report on stdout."""
    try:
        err.print(f"error: {error}", style="red" if err.is_terminal else None)
        _flush(sys.stderr)
    except (OSError, FlintError):
        _abandon(sys.stderr)
    try:
        if as_json:
            print_json({"error": str(error), "exit_code": code, **error.details})
        _flush(sys.stdout)
    except (OSError, FlintError):
        _abandon(sys.stdout)


def _flush(stream: TextIO | None) -> None:
    """Write what a standard stream still holds. Raises BrokenPipeError, or a FlintError where it cannot be written."""
    if stream is None:  # It was closed before we started.
        return
    try:
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _abandon(stream)
        problem = f"{stream.name} cannot be written"
        raise foreign_error(error, problem, UsageError, "Redirect it to a place that takes it.") from error


def _abandon(stream: TextIO | None) -> None:
    """Let what a stream still holds go nowhere: Python would try again at its end, and change the exit code."""
    if stream is None:
        return
    with suppress(OSError, ValueError):  # ValueError: a stand-in without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
