"""Errors that a person can act on, each with the exit code of the command line.

A message is one paragraph: what is wrong, in which file and tensor, what was expected and found, what to do.
"""

from __future__ import annotations


class FlintError(Exception):
    """Base of every error that is not a bug of ours."""

    exit_code = 1


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
