"""Where an engine may be written, and what of an engine directory may be deleted: only what its manifest names."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NoReturn

from flint_runtime.engine import UNFINISHED_SUFFIX
from flint_runtime.errors import UsageError, foreign_errors
from flint_runtime.manifest import MANIFEST_NAME

_MOST_MANIFEST_BYTES = 64 << 20
_MOST_NAMES = 5
"""Names that one message lists."""


def check_output(output: Path, force: bool) -> Path:
    """Find where a build into `output` really writes: behind symbolic links.

    Raises:
        UsageError: a build may not write there.
    """
    with foreign_errors(f"{output} cannot be written", UsageError, "Choose another directory."):
        resolved = Path(os.path.realpath(output))
        for name in (output.name, resolved.name):
            if name.endswith(UNFINISHED_SUFFIX):
                raise UsageError(
                    f"{output} is a name for working directories of builds: engines whose name ends with "
                    f"{UNFINISHED_SUFFIX} are never opened. Choose another name."
                )
        _check_place(resolved)
        if not os.path.lexists(resolved):
            return resolved
        _check_replaceable(resolved)
        if not force:
            raise UsageError(
                f"{output} already holds an engine. Pass --force to replace it (it stays usable until the new one is "
                "complete), or choose another directory."
            )
    return resolved


def existing_folder(path: Path) -> Path:
    """The nearest folder above an absolute path that exists."""
    for folder in path.parents:
        with suppress(FileNotFoundError):
            os.stat(folder)
            return folder
    return Path("/")


def working_directory(output: Path) -> Path:
    """Where a build into an output works."""
    return output.parent / f".{output.name}{UNFINISHED_SUFFIX}"


def aside_directory(output: Path) -> Path:
    """Where the old engine steps aside on a file system that cannot exchange. No build works under that name: outputs
    that end so are refused.
    """
    return output.parent / f".{output.name}{UNFINISHED_SUFFIX}{UNFINISHED_SUFFIX}"


def _check_place(output: Path) -> None:
    """Raise UsageError or OSError where the working directory of an output cannot be made or renamed."""
    folder = existing_folder(output)
    if not stat.S_ISDIR(os.stat(folder).st_mode):
        raise UsageError(f"{output} cannot be written: {folder} is not a directory. Choose another directory.")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(
            f"{output} cannot be written: {folder} is read-only, or not yours to write. Choose another directory."
        )
    longest = os.pathconf(folder, "PC_NAME_MAX")
    ours = len(aside_directory(output).name) - len(output.name)  # what a build adds to the name
    for path, most in [(output, longest - ours), *((parent, longest) for parent in output.parents)]:
        length = len(os.fsencode(path.name))
        if length > most:
            raise UsageError(
                f"{output} cannot be written: the name {path.name} has {length} bytes, at most {most} are possible "
                "there. Choose a shorter name."
            )


def _check_replaceable(output: Path) -> None:
    """Raise UsageError unless what stands at `output` is an engine directory and nothing else."""
    if _is_mount_point(output):
        raise UsageError(
            f"{output} is a mount point, and no directory can take its place. Choose a directory below it."
        )
    found = strays(output)
    if found is None:
        raise UsageError(
            f"{output} exists and is not an engine; build-engine replaces nothing else. Choose another directory."
        )
    if found:
        more = f", and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
        raise UsageError(
            f"{output} is an engine, but holds more than its {MANIFEST_NAME} names: {', '.join(found[:_MOST_NAMES])}"
            f"{more}. Nothing of it was deleted. Move that elsewhere, or choose another directory."
        )


def _is_mount_point(path: Path) -> bool:
    if os.path.ismount(path):
        return True
    # A folder that is bound to another of the same file system looks like any other.
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            name = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), line.split()[4])
            if name == os.fsencode(path):
                return True
    return False


def strays(directory: Path) -> list[str] | None:
    """What an engine directory holds besides its files and their folders, relative; None if it is no engine's."""
    if directory.is_symlink():
        return None
    named = _named_files(directory)
    if named is None:
        return None
    folders = _folders(named)
    found = []

    def refuse(error: OSError) -> NoReturn:
        raise error

    for root, directories, files in os.walk(directory, onerror=refuse):
        base = PurePosixPath(os.path.relpath(root, directory))
        strange = [name for name in directories if str(base / name) not in folders or Path(root, name).is_symlink()]
        found += [f"{base / name}/" for name in strange]
        found += [str(base / name) for name in files if str(base / name) not in named]
        directories[:] = [name for name in directories if name not in strange]
    return found


def delete_engine(directory: Path) -> None:
    """Delete what an engine's manifest names, the manifest last: until then it is known what belongs to the engine.

    What else is there stays, and so does the directory itself.
    """
    named = _named_files(directory)
    if named is None:
        return
    folders = _folders(named)
    for root, directories, files, descriptor in os.fwalk(directory, topdown=False):
        base = PurePosixPath(os.path.relpath(root, directory))
        with suppress(OSError):
            os.chmod(descriptor, stat.S_IRWXU)  # it may be read-only
        for name in files:
            if str(base / name) in named and str(base / name) != MANIFEST_NAME:
                os.unlink(name, dir_fd=descriptor)
        for name in directories:
            if str(base / name) in folders:
                with suppress(OSError):
                    os.rmdir(name, dir_fd=descriptor)
    (directory / MANIFEST_NAME).unlink()


def _named_files(directory: Path) -> frozenset[str] | None:
    """The files that belong to an engine directory, relative: its manifest and what that names; None for another one.

    Engines of every version and damaged ones count, for a rebuild is how they are cured.
    """
    path = directory / MANIFEST_NAME
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_MANIFEST_BYTES:
            return None
        raw = json.loads(path.read_bytes())
        if not isinstance(raw["format_version"], int):
            return None
        names = [PurePosixPath(entry["path"]) for entry in raw["files"]]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return frozenset([MANIFEST_NAME, *(str(name) for name in names)])


def _folders(named: Iterable[str]) -> set[str]:
    return {str(folder) for name in named for folder in PurePosixPath(name).parents}
