"""What `ptxas -v` said of every kernel in the library at hand: no decode kernel spills.

The build keeps it beside the library (plugins/CMakeLists.txt). A spill is read back on a decode step's critical path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flint_plugins.library import find_library, library_info

RESOURCES_NAME = "kernel_resources.txt"
MOST_LIBRARY_BYTES = 40_000_000
PREFILL_ONLY = {"sinkAttentionPrefillKernel", "ringStoreKernel"}
"""All other kernels run in decode steps: those of matrix products from nine tokens on."""
DECODE_KERNELS = {
    "embeddingKernel",
    "qkvProjectKernel",
    "sinkAttentionDecodeKernel",
    "sinkAttentionRowKernel",
    "linearDecodeKernel",
    "mlpUpKernel",
    "moeRouteKernel",
    "routerFewLogitsKernel",
    "moeChooseKernel",
    "moeUpKernel",
    "moeDownKernel",
    "gemmKernel",
    "gemmSplitKernel",
    "gemmStreamKernel",
    "lmHeadKernel",
    "sampleDrawKernel",
}
"""Some that must be there: were kernels renamed, this test would look at nothing."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)a?'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Kernel:
    """One instance for one architecture, such as "sm90"; bytes of its spills, and of those of what it calls."""

    symbol: str
    architecture: str
    spill_bytes: int

    @property
    def name(self) -> str:
        """Without namespace and template arguments."""
        found = re.findall(r"\d+([a-z][A-Za-z]*Kernel)", self.symbol)
        return found[-1] if found else self.symbol


def parse(lines: Iterable[str]) -> list[Kernel]:
    """Kernels in ptxas' output; functions that it lists behind an entry belong to it."""
    kernels: list[Kernel] = []
    for line in lines:
        if entry := _ENTRY.search(line):
            kernels.append(Kernel(entry[1], entry[2].replace("_", ""), 0))
        elif spills := _SPILLS.search(line):
            last = kernels[-1]
            kernels[-1] = Kernel(last.symbol, last.architecture, last.spill_bytes + int(spills[2]) + int(spills[3]))
    return kernels


@pytest.fixture(scope="module")
def library() -> Path:
    return find_library()


@pytest.fixture(scope="module")
def kernels(library: Path) -> list[Kernel]:
    path = library.parent / RESOURCES_NAME
    assert path.is_file(), f"{path} is missing: the build writes it beside the library; install the package again"
    return parse(path.read_text().splitlines())


def test_decode_kernels_do_not_spill(kernels: list[Kernel]) -> None:
    spills = [kernel for kernel in kernels if kernel.spill_bytes and kernel.name not in PREFILL_ONLY]
    assert not spills, "\n".join(f"{k.architecture} {k.symbol}: {k.spill_bytes} bytes" for k in spills)


def test_every_architecture_has_every_kernel(library: Path, kernels: list[Kernel]) -> None:
    by_architecture = {
        architecture: {kernel.name for kernel in kernels if kernel.architecture == architecture}
        for architecture in library_info(library).architectures
    }
    assert {kernel.architecture for kernel in kernels} == by_architecture.keys()
    for architecture, names in by_architecture.items():
        assert names >= DECODE_KERNELS | PREFILL_ONLY, f"{architecture}: {DECODE_KERNELS - names}"
        assert all(name.endswith("Kernel") for name in names), names


def test_the_library_is_small(library: Path) -> None:
    assert library.stat().st_size < MOST_LIBRARY_BYTES


def test_parse() -> None:
    """Spills are counted, with those of functions that a kernel calls."""
    text = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5flint12_GLOBAL__N_119sampleDrawKernelENS_6ParamsEi' for 'sm_90a'
ptxas info    : Function properties for _ZN5flint12_GLOBAL__N_119sampleDrawKernelENS_6ParamsEi
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Function properties for _ZN5flint5mergeEv
    0 bytes stack frame, 2 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_ZN5flint10gemmKernelILi4EEEvi' for 'sm_120a'
ptxas info    : Function properties for _ZN5flint10gemmKernelILi4EEEvi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    found = [(kernel.name, kernel.architecture, kernel.spill_bytes) for kernel in parse(text.splitlines())]
    assert found == [("sampleDrawKernel", "sm90", 14), ("gemmKernel", "sm120", 0)]
