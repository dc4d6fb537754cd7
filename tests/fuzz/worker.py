"""The process that reads mutants: in this process, one after the other, each within limits of time and memory.

A separate process, so that one that ends by a signal is noticed, and which mutant was under way.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from flint_runtime.errors import MOST_CHARACTERS, FlintError
from tests.fuzz.targets import Target

MOST_SECONDS = 2.0
"""Processor time of this process for one mutant. Not time of the clock: the machine may be busy with other work."""
MOST_BYTES = 1 << 30
"""Resident memory above that at the start of a mutant."""
_KILL_SECONDS = 10
"""Processor time after which the kernel ends the process; it stops loops in native code, too."""
_KILL_BYTES = 4 << 30
"""Address space above that at the start, likewise."""
_DEEP_SHARE = 8
"""One of so many mutants is used after it was read."""
_CODES = (2, 3, 4, 5)
"""Exit codes of errors that a person can act on."""


@dataclass(frozen=True)
class Result:
    """What came of a mutant. `fault` is what was wrong with that, or empty."""

    index: int
    kind: str
    outcome: str
    fault: str
    seconds: float
    bytes: int


def work(
    connection: Connection, seed: str, indices: Sequence[int], seeds: Path, place: Path, kinds: Sequence[type[Target]]
) -> None:
    """Read mutants and send a Result for each. Everything about mutant `index` follows from `seed` and `index`."""
    place.mkdir()
    errors = os.open(place / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(errors, 2)
    faulthandler.enable()
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    torch.set_num_threads(1)
    targets = [kind(seeds, place) for kind in kinds]
    for target in targets:  # what is loaded or cached at first use is no mutant's
        target.read(deep=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _KILL_BYTES, resource.RLIM_INFINITY))
    connection.send(None)
    for index in indices:
        os.ftruncate(errors, 0)
        connection.send(_try(targets[index % len(targets)], seed, index))
    connection.close()


def _try(target: Target, seed: str, index: int) -> Result:
    random = Random(f"{seed} {index}")
    files = target.mutate(random)
    deep = random.randrange(_DEEP_SHARE) == 0
    with target.placed(files):
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        started = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(started) + _KILL_SECONDS, resource.RLIM_INFINITY))
        outcome, fault = _outcome(target, deep)
        seconds = time.process_time() - started
        grown = max(0, _resident("VmHWM") - before)
    if seconds > MOST_SECONDS:
        fault += f"\nIt took {seconds:.1f} s; {MOST_SECONDS} are allowed."
    if grown > MOST_BYTES:
        fault += f"\nIt took {grown >> 20} MiB; {MOST_BYTES >> 20} are allowed."
    return Result(index, target.kind, "fault" if fault else outcome, fault, seconds, grown)


def _outcome(target: Target, deep: bool) -> tuple[str, str]:
    """What reading a mutant came to, and what is wrong with that."""
    try:
        target.read(deep)
    except FlintError as error:
        return type(error).__name__, _badly_said(error)
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        return type(error).__name__, "".join(traceback.format_exception(error))
    return "accepted", ""


def _badly_said(error: FlintError) -> str:
    """What is wrong with an error of ours, or nothing."""
    text = str(error)
    problems = []
    if error.exit_code not in _CODES:
        problems.append(f"exit code {error.exit_code}")
    if not text or not text.isprintable() or len(text) > MOST_CHARACTERS:
        problems.append("no printable paragraph")
    if any(isinstance(cause, MemoryError) for cause in _chain(error)):
        problems.append("memory ran out")
    return f"{', '.join(problems)}: {''.join(traceback.format_exception(error))}" if problems else ""


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
