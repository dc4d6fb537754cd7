"""Errors that a person can act on, each with the exit code of the command line.

A message is one paragraph: what is wrong, in which file and tensor, what was expected and found, what to do. Whatever
a stranger's file or name brings into it, it prints on any terminal and stays short.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MOST_CHARACTERS = 990
"""Of a message. With what stands before it on the command line ("error: ") at most 1,000."""


class FlintError(Exception):
    """Base of every error that is not a bug of ours.

    Attributes:
        details: what a machine-readable report says besides the message.
    """

    exit_code = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(shortened(printable(shortened(message))))
        self.details = details


class UsageError(FlintError, ValueError):
    """The command line or an argument is wrong. A ValueError, as vLLM's are."""

    exit_code = 2


class CheckpointError(FlintError):
    """The checkpoint is incomplete, damaged, contradictory or of an unsupported kind."""

    exit_code = 3


class UnsupportedError(FlintError):
    """The target, backend or engine cannot be built or run here."""

    exit_code = 4


class EngineError(UnsupportedError):
    """An engine directory is damaged, or was built for something else."""


class ResourceError(FlintError):
    """Not enough disk, host memory or GPU memory."""

    exit_code = 5


class EngineDeadError(FlintError):
    """The engine died, or was shut down, while requests were running: they, and later ones, end with this."""


FOREIGN_ERRORS = (OSError, UnicodeError, MemoryError, RecursionError)
"""What the world may do to a correct program: they are never a reason for a traceback."""

_EXHAUSTED = {
    errno.ENOSPC: "Free some space on that disk, or choose another",
    errno.EDQUOT: "Free some space of your quota, or choose another disk",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or choose another file system",
    errno.ENOMEM: "Close other programs and run again",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Close other programs and run again",
}
"""Errors that say that something ran out, and what helps."""


def foreign_error(error: BaseException, problem: str, kind: type[FlintError], advice: str) -> FlintError:
    """One of FOREIGN_ERRORS as an error of ours: a ResourceError where something ran out, else a `kind`.

    Args:
        problem: what could not be done with which file, such as "model.gguf cannot be read".
        advice: a sentence that says what to do.
    """
    if isinstance(error, MemoryError):
        return ResourceError(f"{problem}: host memory ran out. Close other programs and run again.")
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        names = [name for name in names if name and name not in problem]
        where = f" ({', '.join(names)})" if names else ""
        if error.errno in _EXHAUSTED:
            return ResourceError(f"{problem}: {reason}{where}. {_EXHAUSTED[error.errno]}.")
        return kind(f"{problem}: {reason}{where}. {advice}")
    if isinstance(error, RecursionError):
        return kind(f"{problem}: it is nested too deeply. {advice}")
    if isinstance(error, UnicodeDecodeError):
        wrong = error.object[error.start]
        return kind(f"{problem}: it is not {error.encoding}, byte {wrong:#04x} at offset {error.start}. {advice}")
    return kind(f"{problem}: {error}. {advice}")


@contextmanager
def foreign_errors(problem: str, kind: type[FlintError], advice: str) -> Iterator[None]:
    """Turn FOREIGN_ERRORS inside the block into errors of ours; see `foreign_error`."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise foreign_error(error, problem, kind, advice) from error


def printable(text: str) -> str:
    """A text with everything escaped that does not print: control characters, line ends, marks that turn the writing
    direction, and bytes of a file name that are not UTF-8.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode's stand-in for a byte
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text of at most `most` characters: both ends stay, for what is wrong stands first and what to do last."""
    if len(text) <= most:
        return text
    mark = " … "
    tail = most // 3
    return text[: most - tail - len(mark)] + mark + text[-tail:]


def shown(value: object) -> str:
    """A value for a message: at most 100 characters, whatever it is."""
    if isinstance(value, Mapping | list | tuple) and len(value) > 100:
        return f"{type(value).__name__} of {len(value)} items"
    try:
        text = repr(value)
    except Exception:  # an integer of 5,000 digits, a list that is nested too deeply, an object of the caller's
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:99] + "…"
