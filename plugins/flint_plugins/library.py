"""Find the plugin library, ask it what it is, and refuse one that does not fit. Needs neither a GPU nor TensorRT."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import flint_plugins
from flint_plugins.layout import LAYOUT_VERSION
from flint_plugins.ops import OPS, VERSION

LIBRARY_NAME = "libflint_plugins.so"
STUB_NAME = "libtensorrt_rtx.so"
"""Gives TensorRT-RTX's ONNX parser the library name that it asks for (see plugins/CMakeLists.txt)."""
ENVIRONMENT_VARIABLE = "FLINT_PLUGINS_LIBRARY"
_DISTRIBUTION = "flint-tensorrt"
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
"""Processors by their number in a library's header (ELF's e_machine), named as `platform.machine` does."""
_CURE = (
    "Install the package again (`pip install -e .` in the source tree compiles the library and needs nvcc), or set "
    f"{ENVIRONMENT_VARIABLE} to a library that fits"
)


class LibraryError(RuntimeError):
    """The plugin library is missing, cannot be loaded, or is of another version. One paragraph."""


@dataclass(frozen=True)
class LibraryInfo:
    """What a plugin library says of itself."""

    version: str
    architectures: tuple[str, ...]
    """Architectures that it has machine code for, such as "sm120"."""
    header_version: str
    """Of the TensorRT headers that it was compiled with."""
    layout_version: int
    """Of the packed weights that its kernels read: `flint_plugins.layout.LAYOUT_VERSION`."""
    ops: dict[str, str]
    """Version of each op."""


def package_version() -> str:
    """Version of this installation, which its plugin library must share.

    Raises:
        LibraryError: the package is imported from a source tree that was never installed.
    """
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError(
            f"The package {_DISTRIBUTION} is not installed, so the version of plugin library that it needs is not "
            "known. Run `pip install -e .` in the source tree."
        ) from None


def find_library() -> Path:
    """Absolute path of the plugin library: the environment variable's, or else the package's own.

    Raises:
        LibraryError: there is none.
    """
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    if override:
        path = Path(override).absolute()
        if not path.is_file():
            raise LibraryError(
                f"The plugin library {path}, which the environment variable {ENVIRONMENT_VARIABLE} names, does not "
                f"exist. Correct or unset the variable."
            )
        return path
    return _package_file(LIBRARY_NAME)


def find_stub() -> Path:
    """Absolute path of the stub that TensorRT-RTX's ONNX parser needs: beside the library or in the package.

    Raises:
        LibraryError: there is none.
    """
    return _package_file(STUB_NAME)


def _package_file(name: str) -> Path:
    # An editable install keeps compiled files apart from the sources: the package then has two folders.
    folders = [Path(folder).absolute() / "lib" for folder in flint_plugins.__path__]
    if override := os.environ.get(ENVIRONMENT_VARIABLE):
        folders.insert(0, Path(override).absolute().parent)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    places = " and ".join(str(folder) for folder in folders)
    raise LibraryError(f"{name} is missing: it was looked for in {places}. {_CURE}.")


def library_for_host(own: Path) -> Path:
    """The library to load for an engine: its own, or this installation's if its own is for another processor.

    An engine that was built on x86-64 may run on arm64: all else in it is the same for both.

    Args:
        own: the library in the engine.
    Raises:
        LibraryError: this installation has none.
    """
    try:
        with own.open("rb") as file:
            header = file.read(20)
    except OSError:
        return own  # What is wrong with it, loading it will say.
    machine = _ELF_MACHINES.get(int.from_bytes(header[18:20], "little")) if header[:4] == b"\x7fELF" else None
    return own if machine in (None, platform.machine()) else find_library()


def library_info(path: Path) -> LibraryInfo:
    """Load a plugin library into this process and return what it says of itself.

    Raises:
        LibraryError: it does not exist, cannot be loaded, or is not a Flint plugin library.
    """
    if not path.is_file():
        raise LibraryError(f"The plugin library {path} does not exist. {_CURE}.")
    try:
        describe = ctypes.CDLL(str(path.absolute())).flintPluginsInfo
    except OSError as error:
        raise LibraryError(f"The plugin library {path} cannot be loaded: {error}. {_CURE}.") from error
    except AttributeError:
        raise LibraryError(f"{path} is not a Flint plugin library: it exports no flintPluginsInfo. {_CURE}.") from None
    describe.argtypes, describe.restype = [], ctypes.c_char_p
    try:
        raw = json.loads(describe().decode())
        return LibraryInfo(
            raw["version"], tuple(raw["architectures"]), raw["header_version"], raw["layout_version"], dict(raw["ops"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LibraryError(
            f"The plugin library {path} describes itself in an unknown way ({error!r}). {_CURE}."
        ) from error


def check_library(
    path: Path,
    *,
    version: str | None = None,
    layout_version: int = LAYOUT_VERSION,
    ops: Iterable[str] = OPS,
) -> LibraryInfo:
    """Return a library's info if it fits.

    Args:
        path: the library.
        version: the version wanted, such as an engine's `plugins_version`; None for that of this installation.
        layout_version: of the packed weights that it is to read.
        ops: that it must have.
    Raises:
        LibraryError: it cannot be used; names the library, what was found and what was wanted.
    """
    wanted = package_version() if version is None else version
    info = library_info(path)
    if info.version != wanted:
        raise LibraryError(
            f"The plugin library {path} is version {info.version}, but version {wanted} is wanted. {_CURE}."
        )
    if info.layout_version != layout_version:
        raise LibraryError(
            f"The plugin library {path} (version {info.version}) reads packed weights of layout "
            f"{info.layout_version}, but layout {layout_version} is wanted. {_CURE}."
        )
    missing = [name for name in ops if info.ops.get(name) != VERSION]
    if missing:
        raise LibraryError(
            f"The plugin library {path} (version {info.version}) lacks version {VERSION} of the ops "
            f"{', '.join(missing)}. {_CURE}."
        )
    return info
