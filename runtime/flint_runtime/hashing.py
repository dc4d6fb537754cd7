"""BLAKE3 of many files at once: a thread per core, for the hash is computed without the interpreter lock.

BLAKE3, for it is as strong as SHA-256 and about ten times as fast on a processor without SHA instructions: a build and
`verify` wait for the disk instead of the hash.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

CHUNK_BYTES = 1 << 20
"""Of one read: what is hashed then still lies in a core's second cache."""
_AHEAD_BYTES = 8 << 20
"""The kernel is asked to fetch blocks of this size, one block ahead of the one being read, once each. Asked for 4 MB
after every read of as much, it took twice the processor time (uncached file, 2 threads, virtual disk)."""


def hash_files(paths: Sequence[Path], progress: Callable[[int], None]) -> Iterator[str | OSError]:
    """Hash files and yield each one's BLAKE3 in hexadecimal, or what kept it from being read, in the order given.

    Args:
        progress: called with the number of bytes read since the last call, from several threads.
    """
    stopped = threading.Event()

    def work(path: Path) -> str | OSError:
        try:
            return _hash_file(path, progress, stopped)
        except OSError as error:
            return error

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        yield from pool.map(work, paths)
    finally:  # Also where the caller has heard enough, or Ctrl-C was pressed.
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _hash_file(path: Path, progress: Callable[[int], None], stopped: threading.Event) -> str:
    digest = blake3()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        done = asked = 0
        while not stopped.is_set():
            if asked <= done + _AHEAD_BYTES:
                os.posix_fadvise(file.fileno(), asked, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                asked += _AHEAD_BYTES
            if not (count := file.readinto(buffer)):
                break
            done += count
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()
