"""Reading a checkpoint file with plain reads: never mapped, so memory stays bounded and truncation is an error."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flint_runtime.errors import CheckpointError, FlintError, foreign_error

_MAX_VECTORS = 1024
"""Buffers of one preadv: Linux's IOV_MAX."""
_AHEAD_BYTES = 8 << 20
"""The kernel is asked to fetch a block of this size ahead of the one being read, once per block. Workers take turns in
one file, in which its own read-ahead sees no order: reading an uncached file gained a factor of 1.5 to 2 (3 workers,
virtual disk, busy machine). Asking at every read costs more than the reads."""

UInt8 = npt.NDArray[np.uint8]


class DataFile:
    """A regular file, open for reading as long as this object lives.

    Raises:
        CheckpointError: the path is not a readable regular file.
        ResourceError: too many files are open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        except FileNotFoundError:
            leads = f" leads to {os.readlink(path)}, which" if path.is_symlink() else ""
            raise CheckpointError(f"{path}{leads} does not exist. Download the checkpoint again.") from None
        except OSError as error:
            raise self._unreadable(error) from None
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file; pass a checkpoint file or its directory.")
        self.size = status.st_size
        """Bytes."""

    def __str__(self) -> str:
        return str(self.path)

    def read(self, offset: int, count: int) -> bytes:
        """Read `count` bytes at byte `offset`; fewer only at the end of the file."""
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise self._unreadable(error) from None

    def read_into(self, offset: int, buffers: Sequence[UInt8], what: str) -> None:
        """Fill C-contiguous buffers, one behind the other, from byte `offset`.

        Args:
            what: the tensor read, for messages.
        Raises:
            CheckpointError: the file ends early or cannot be read.
        """
        pending = [buffer.data.cast("B") for buffer in buffers]
        end = offset + sum(view.nbytes for view in pending)
        try:
            self._fetch_ahead(offset, end)
            while pending:
                count = os.preadv(self._descriptor, pending[:_MAX_VECTORS], offset)
                if count == 0:
                    raise CheckpointError(
                        f"{self.path} ends at byte {offset}, but {what} needs bytes up to {end}: the file was cut "
                        "off while it was read. Download it again."
                    )
                offset += count
                done = 0
                while done < len(pending) and count >= pending[done].nbytes:
                    count -= pending[done].nbytes
                    done += 1
                pending = pending[done:]
                if count:
                    pending[0] = pending[0][count:]
        except OSError as error:
            raise self._unreadable(error, f" ({what})") from None

    def _unreadable(self, error: OSError, what: str = "") -> FlintError:
        problem = f"{self.path} cannot be read{what}"
        return foreign_error(error, problem, CheckpointError, "Make it readable, or download it again.")

    def _fetch_ahead(self, first: int, end: int) -> None:
        """Ask for the next block when a read, of bytes `first` to `end`, reaches a new one."""
        block = end // _AHEAD_BYTES
        if block != first // _AHEAD_BYTES:
            os.posix_fadvise(self._descriptor, (block + 1) * _AHEAD_BYTES, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
