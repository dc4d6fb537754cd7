"""Publishing an engine directory: all of it or nothing, whatever happens on the way, and nobody else's files touched.

A build writes into a working directory beside the output, `.NAME.building`, and renames it when everything is on
disk. The working directory is also the lock: its holder has an exclusive flock, which ends with the process, so a
killed build leaves at most this one directory, and the next build into the same output empties and reuses it. It does
so only where it knows that nothing in it is anybody else's (`_clear`): a marker lies in it from the first to the last.

An output that is a symbolic link is resolved first: what it leads to is replaced, and the link stays.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from flint_builder.output import aside_directory, check_output, delete_engine, strays, working_directory
from flint_runtime.console import err
from flint_runtime.errors import UsageError
from flint_runtime.manifest import MANIFEST_NAME, Manifest, encode_manifest

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MARKER = ".flint-building"
"""A file in every working directory, removed when it is published."""


class Staging:
    """The working directory of one build; a context manager that removes it unless `publish` was called.

    Attributes:
        output: where the engine will stand, behind symbolic links.
        directory: where to write it.
    Raises:
        UsageError: the output may not be written or replaced, another build is writing it, or something that is not
            ours has the working directory's name.
    """

    def __init__(self, output: Path, force: bool) -> None:
        self.output = check_output(output, force)
        self.directory = working_directory(self.output)
        self._aside = aside_directory(self.output)
        self._force = force
        self._lock: int | None = None
        self._replaced: Path | None = None

    def __enter__(self) -> Staging:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire(create=True)
        try:
            self._recover()
            self._check()  # another build may have finished since
            _clear(self.directory)
            (self.directory / _MARKER).write_text("build-engine works here. The next build empties this folder.\n")
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._is_published():
                self._release()  # It went with the directory to the output.
                self._delete_replaced()
            elif self._lock is not None and _is_at(self._lock, self.directory):
                with suppress(OSError):
                    _remove_working_directory(self.directory)
        finally:
            self._release()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, sync everything and put the directory in place of the output.

        Every file must have been synced by its writer.
        """
        write_synced(self.directory / MANIFEST_NAME, encode_manifest(manifest))
        (self.directory / _MARKER).unlink()
        for directory, _, _ in os.walk(self.directory):
            sync_directory(Path(directory))
        self._check()
        if os.path.lexists(self.output):
            self._exchange()
        else:
            self.directory.rename(self.output)
        sync_directory(self.output.parent)

    def _check(self) -> None:
        if check_output(self.output, self._force) != self.output:
            raise UsageError(f"{self.output} has become a symbolic link during the build. Run it again.")

    def _acquire(self, create: bool) -> int | None:
        """Lock the working directory; None where there is none and none is to be created."""
        while True:
            if create:
                with suppress(FileExistsError):
                    self.directory.mkdir()
            try:
                lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if create:
                    continue  # a build that just ended removed it
                return None
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    _in_the_way(self.directory)
                raise
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise UsageError(
                    f"Another build is writing {self.output} at this moment. Wait for it, or choose another directory."
                ) from None
            if _is_at(lock, self.directory):
                return lock
            os.close(lock)  # it was published or removed between open and flock

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_published(self) -> bool:
        return self._lock is not None and _is_at(self._lock, self.output)

    def _exchange(self) -> None:
        """Swap two directories in one step, so that the output is at every moment an engine (Linux renameat2)."""
        new, old = self.directory, self.output
        self._replaced = new
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # not every C library has it
        if rename is not None:
            if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(code, os.strerror(code), str(old))
        # A file system that cannot exchange: for a moment the output does not exist.
        self._replaced = self._aside
        old.rename(self._aside)
        try:
            new.rename(old)
        except BaseException:
            self._aside.rename(old)
            raise

    def _recover(self) -> None:
        """Undo what a build left that was killed while the old engine stood aside."""
        with suppress(OSError):
            self._aside.rmdir()  # it may be empty already
        if not os.path.lexists(self._aside):
            return
        if strays(self._aside) != []:
            _in_the_way(self._aside)
        if os.path.lexists(self.output):
            delete_engine(self._aside)
            self._aside.rmdir()
        else:
            self._aside.rename(self.output)

    def _delete_replaced(self) -> None:
        """Delete the engine that was replaced, if any; the next build may have taken the working directory already."""
        if self._replaced is None:
            return
        try:
            self._lock = self._acquire(create=False)
            if self._lock is not None or self._replaced == self._aside:
                delete_engine(self._replaced)
                self._replaced.rmdir()
        except UsageError:
            return
        except OSError as error:
            err.print(
                f"warning: {self._replaced} holds the rest of the engine that was replaced, which cannot be deleted: "
                f"{error.strerror}. Delete it, or move away what somebody put into it."
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


def _clear(directory: Path) -> None:
    """Empty the working directory, which may hold what a killed build wrote, or an engine that was replaced.

    Raises:
        UsageError: it may hold anything else.
    """
    if _is_ours(directory):
        _empty_working_directory(directory)
    elif strays(directory) == []:
        delete_engine(directory)
    if os.listdir(directory) not in ([], [_MARKER]):
        _in_the_way(directory)


def _is_ours(directory: Path) -> bool:
    """Whether the working directory was made by a build: it has the marker."""
    try:
        return stat.S_ISREG(os.lstat(directory / _MARKER).st_mode)
    except FileNotFoundError:
        return False


def _empty_working_directory(directory: Path) -> None:
    """Delete everything but the marker, without following links."""
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        elif entry.name != _MARKER:
            os.unlink(entry)


def _remove_working_directory(directory: Path) -> None:
    """Delete a working directory, the marker last: until then the next build knows it for ours."""
    with suppress(OSError):
        (directory / _MARKER).touch()
    _empty_working_directory(directory)
    (directory / _MARKER).unlink(missing_ok=True)
    directory.rmdir()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path leads to the directory that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _in_the_way(path: Path) -> NoReturn:
    raise UsageError(
        f"{path} is in the way: builds work under that name, but this was made by something else, so it is left as it "
        "is. Move it elsewhere, or choose another output directory."
    )
