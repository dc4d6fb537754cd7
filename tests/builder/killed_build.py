"""Runs build-engine and kills it with SIGKILL at one of its file operations.

Usage: python -m tests.builder.killed_build OPERATION FOLDER build-engine-arguments...

OPERATION counts the operations (open, mkdir, rename, remove, exchange) on paths below FOLDER; at 0 the build runs to
its end and the number of operations up to the one that publishes is printed. No hook in the product is needed: Python
reports each operation to audit hooks before it happens.
"""

from __future__ import annotations

import os
import signal
import sys

operation, folder = int(sys.argv[1]), sys.argv[2]
count = published = 0


def watch(event: str, args: tuple[object, ...]) -> None:
    global count, published
    paths = [os.fsdecode(x) for x in args if isinstance(x, str | bytes | os.PathLike)]
    if event == "ctypes.dlsym":
        ours = "renameat2" in paths
    else:
        ours = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and any(
            p.startswith(folder) for p in paths
        )
    if not ours:
        return
    count += 1
    if event in ("os.rename", "ctypes.dlsym"):
        published = count
    if count == operation:
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(watch)
sys.argv = ["build-engine", *sys.argv[3:]]

from flint_builder.cli import main  # noqa: E402

try:
    main()
finally:
    if operation == 0:
        print(f"operations: {published}", file=sys.stderr)
