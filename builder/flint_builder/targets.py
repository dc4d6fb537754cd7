"""Which GPU architectures an engine is for, and through which backend it is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flint_builder.plan import is_importable, supported_targets
from flint_plugins.library import LibraryError, check_library, find_library
from flint_runtime.errors import UnsupportedError, UsageError
from flint_runtime.manifest import Backend

BackendChoice = Literal["auto", "tensorrt", "tensorrt-rtx", "plugin-host"]


def parse_targets(text: str) -> tuple[str, ...]:
    """Split "sm120,sm121" into its targets, in order and without repetition. Raises UsageError."""
    targets = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [t for t in targets if not re.fullmatch(r"sm\d{2,3}", t)]
    if wrong or not targets:
        raise UsageError(
            f"--target {text!r}: expected GPU architectures such as sm120 (RTX 50, PRO 6000 Blackwell), sm121 (GB10), "
            "sm100 (B200) or sm90 (H100, H200), separated by commas."
        )
    return targets


def choose_backend(choice: BackendChoice, targets: Sequence[str]) -> Backend:
    """Resolve --backend for the targets.

    auto takes TensorRT-RTX where it offers every target, else TensorRT where it is installed, else the plugin host.

    Raises:
        UnsupportedError: the backend does not offer a target, or is not installed.
    """
    offered = supported_targets("tensorrt-rtx")
    fits_rtx = all(target in offered for target in targets)
    if choice == "auto":
        if fits_rtx:
            choice = "tensorrt-rtx"
        else:
            choice = "tensorrt" if is_importable("tensorrt") else "plugin-host"
    if choice == "tensorrt-rtx" and not fits_rtx:
        raise UnsupportedError(
            f"TensorRT-RTX builds for {', '.join(offered)}, "
            f"not for {', '.join(t for t in targets if t not in offered)}. "
            "Use --backend tensorrt on a machine with that GPU, or --backend plugin-host, which needs no TensorRT."
        )
    if choice != "plugin-host" and not is_importable(choice):
        extra = {"tensorrt": "tensorrt", "tensorrt-rtx": "rtx"}[choice]
        raise UnsupportedError(
            f"Backend {choice} is not installed. Install it with: pip install 'flint-tensorrt[{extra}]', or build with "
            "--backend plugin-host, which needs no TensorRT."
        )
    if choice == "tensorrt" and len(targets) > 1:
        raise UnsupportedError(
            f"TensorRT builds for the GPU it runs on, one at a time, not for {', '.join(targets)}. Build an engine per "
            "target."
        )
    return choice


def find_checked_library(targets: Sequence[str]) -> Path:
    """The installed plugin library. Raises UnsupportedError unless it fits and holds code for every target."""
    try:
        library = find_library()
        built = check_library(library).architectures
    except LibraryError as error:
        raise UnsupportedError(str(error)) from error
    missing = [t for t in targets if t not in built]
    if missing:
        raise UnsupportedError(
            f"{library} holds GPU code for {', '.join(built) or 'no architecture'}, not for {', '.join(missing)}. "
            f'Compile it with: make plugins TARGETS="{" ".join(dict.fromkeys([*built, *missing]))}"'
        )
    return library
