"""The fuzzer itself: twenty seconds of it with a fresh seed, and that it does find what is wrong."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from flint_runtime.errors import FlintError, UsageError
from flint_runtime.executors import engine_check
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, Files, Graph, Target

SECONDS = 20.0


def test_twenty_seconds_of_mutants() -> None:
    """Success or a documented error, for any mutant. Whatever it finds is repeated with the line that it prints."""
    report = fuzz(secrets.token_hex(4), range(1 << 30), seconds=SECONDS)
    assert not report.faults, f"\n{report}"
    for target in TARGETS:  # On a slow machine a kind has some fifty mutants, of which all may be refused.
        outcomes = {outcome for kind, outcome in report.counts if kind == target.kind}
        assert outcomes - {"accepted"}, f"{target.kind} was only {outcomes}\n{report}"
    assert any(outcome == "accepted" for _, outcome in report.counts), f"\n{report}"


def test_a_mutant_follows_from_seed_and_number(tmp_path: Path) -> None:
    from tests.fuzz.targets import make_seeds

    seeds = make_seeds(tmp_path / "seeds")
    for kind in TARGETS:
        for name in ("first", "second"):
            (tmp_path / name).mkdir(exist_ok=True)
        first, second = kind(seeds, tmp_path / "first"), kind(seeds, tmp_path / "second")
        mutants = [first.mutate(Random(f"a {index}")) for index in range(20)]
        assert mutants == [second.mutate(Random(f"a {index}")) for index in range(20)]
        with first.placed(mutants[0]):
            assert all((first.directory / name).read_bytes() == data for name, data in mutants[0].items())
        for path in first.original.rglob("*"):
            assert path.is_dir() or path.samefile(first.directory / path.relative_to(first.original))


def _wait() -> None:
    while True:
        pass


def _break_down() -> None:
    raise FlintError("This is a bug of ours.")


def _shout() -> None:
    error = UsageError("")
    error.args = ("two\nlines.",)
    raise error


def _grow() -> None:
    bytearray(b"x") * (9 << 27)


PLANTED: dict[str, tuple[Callable[[], object], str]] = {
    "another exception": (lambda: {}["missing"], "KeyError: 'missing'"),
    "no Exception at all": (lambda: (_ for _ in ()).throw(SystemExit(3)), "SystemExit: 3"),
    "a bug of ours": (_break_down, "exit code 1: "),
    "a message of two lines": (_shout, "no printable paragraph: "),
    "1.1 GiB": (_grow, "1024 are allowed"),
    "a loop": (_wait, "The process ended with SIGXCPU"),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "Segmentation fault"),
}


class Planted(Target):
    """A fault of each sort, in the order of PLANTED, and after each a mutant that is fine."""

    kind, seed = "planted", "gguf"

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        self._name = ""

    def mutate(self, random: Random) -> Files:
        self._name = random.choice(["", *PLANTED])
        return {"config.json": self._name.encode()}

    def read(self, deep: bool) -> None:
        if self._name:
            PLANTED[self._name][0]()


def test_it_finds_every_sort_of_fault() -> None:
    """And goes on behind those that end the process."""
    drawn = {}
    for index in range(100):
        drawn.setdefault(Random(f"planted {index}").choice(["", *PLANTED]), index)
    report = fuzz("planted", sorted(drawn.values()), kinds=(Planted,))
    faults = {fault.index: fault.fault for fault in report.faults}
    assert faults.keys() == {index for name, index in drawn.items() if name}
    for name, (_, message) in PLANTED.items():
        assert message in faults[drawn[name]], name
    assert report.counts["planted", "accepted"] == 1
    assert f"make fuzz SEED=planted ONLY={drawn['a loop']}" in str(report)


class UncheckedGraph(Graph):
    """Graphs, were they not checked when an engine is opened."""

    def __init__(self, seeds: Path, place: Path) -> None:
        super().__init__(seeds, place)
        engine_check.check_graph = lambda *arguments: None

    def read(self, deep: bool) -> None:
        super().read(deep=True)


def test_it_finds_a_check_that_is_missing() -> None:
    report = fuzz("unchecked", range(40), kinds=(UncheckedGraph,))
    assert any("Error" in fault.fault and "executors" in fault.fault for fault in report.faults), f"\n{report}"


class Unopenable(Planted):
    def read(self, deep: bool) -> None:
        raise UsageError("No.")


def test_seeds_must_be_accepted() -> None:
    with pytest.raises(RuntimeError, match=r"seeds are not accepted: (.|\n)*No\."):
        fuzz("seeds", range(1), kinds=(Unopenable,))
