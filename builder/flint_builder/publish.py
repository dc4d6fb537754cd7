"""Publishing an engine directory: all of it or nothing, whatever happens on the way.

A build writes into a working directory beside the output, `.NAME.building`, and renames it when everything is on
disk. The working directory is also the lock: its holder has an exclusive flock, which ends with the process, so a
killed build leaves at most this one directory, and the next build into the same output empties and reuses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from flint_runtime.engine import UNFINISHED_SUFFIX
from flint_runtime.errors import UsageError
from flint_runtime.manifest import MANIFEST_NAME, Manifest, encode_manifest

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Staging:
    """The working directory of one build; a context manager that removes it unless `publish` was called.

    Raises:
        UsageError: the output exists and may not be replaced, or another build is writing it.
    """

    def __init__(self, output: Path, force: bool) -> None:
        self.output = output.absolute()
        self.directory = self.output.parent / f".{self.output.name}{UNFINISHED_SUFFIX}"
        self._force = force
        self._lock: int | None = None
        self._published = False

    def __enter__(self) -> Staging:
        check_output(self.output, self._force)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire()
        try:
            check_output(self.output, self._force)  # another build may have finished since
            _empty(self.directory)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._published:
            # Our lock went with the directory to the output. Under the working name stands the engine that was
            # replaced, if any; the next build may have taken it over already.
            self._release()
            if not self.directory.exists():
                return
            try:
                self._lock = self._acquire()
            except UsageError:
                return
        shutil.rmtree(self.directory, ignore_errors=True)
        self._release()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, sync everything and put the directory in place of the output.

        Every file must have been synced by its writer.
        """
        write_synced(self.directory / MANIFEST_NAME, encode_manifest(manifest))
        for directory, _, _ in os.walk(self.directory):
            sync_directory(Path(directory))
        if self.output.exists():
            check_output(self.output, self._force)
            _exchange(self.directory, self.output)
        else:
            self.directory.rename(self.output)
        self._published = True
        sync_directory(self.output.parent)

    def _acquire(self) -> int:
        while True:
            self.directory.mkdir(exist_ok=True)
            try:
                lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # a build that just ended removed it
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise UsageError(
                    f"Another build is writing {self.output} at this moment. Wait for it, or choose another directory."
                ) from None
            try:
                if os.path.samestat(os.fstat(lock), os.stat(self.directory)):
                    return lock
            except FileNotFoundError:
                pass
            os.close(lock)  # it was published or removed between open and flock

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_output(output: Path, force: bool) -> None:
    """Raise UsageError where a build may not write `output`."""
    if not output.exists() and not output.is_symlink():
        return
    if not (output / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{output} exists and is not an engine; build-engine replaces nothing else. Choose another directory."
        )
    if not force:
        raise UsageError(
            f"{output} already holds an engine. Pass --force to replace it (it stays usable until the new one is "
            "complete), or choose another directory."
        )


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one step, so that the output is at every moment an engine (Linux renameat2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(old))
    # A file system that cannot exchange: for a moment the output does not exist.
    aside = old.with_name(f".{old.name}.replaced{UNFINISHED_SUFFIX}")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)
