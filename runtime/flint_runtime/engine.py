"""Opening an engine directory: the checks that stand between a person's path and an executor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from flint_plugins.layout import LAYOUT_VERSION
from flint_runtime.errors import EngineError
from flint_runtime.manifest import LIBRARY_NAME, MANIFEST_NAME, READABLE_FORMATS, FileEntry, Manifest, Phase

UNFINISHED_SUFFIX = ".building"
"""Ends the name of a build's working directory, which is never an engine."""

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Engine:
    """An engine directory whose manifest is readable and whose files have their sizes."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: Path) -> Engine:
        """Open an engine directory.

        Raises:
            EngineError: not an engine, an unfinished one, of another format, or with a file missing or cut off.
        """
        directory = directory.absolute()
        if directory.name.endswith(UNFINISHED_SUFFIX):
            raise EngineError(
                f"{directory} is the working directory of a build that has not finished, not an engine. "
                "Run build-engine again: it cleans up after itself."
            )
        manifest = read_manifest(directory)
        for entry in manifest.files:
            problem = size_problem(directory, entry)
            if problem:
                raise EngineError(f"Engine {directory} is damaged: {problem}. Copy it again or rebuild it.")
        return cls(directory, manifest)

    def path(self, relative: str) -> Path:
        """Path of a file that the manifest lists. Raises EngineError where it lists none of that name."""
        if all(entry.path != relative for entry in self.manifest.files):
            raise EngineError(f"Engine {self.directory} has no {relative}; rebuild it with this version.")
        return self.directory / relative

    def graph_path(self, phase: Phase) -> Path:
        """The ONNX graph of a phase."""
        return self.path(f"graph/{phase}.onnx")

    def plan_path(self, phase: Phase) -> Path:
        """The TensorRT plan of a phase; engines of backend plugin-host have none."""
        return self.path(f"plans/{phase}.plan")

    @property
    def library_path(self) -> Path:
        """The plugin library."""
        return self.path(LIBRARY_NAME)

    def weight_paths(self) -> list[Path]:
        """The weight files, in file order."""
        return [self.directory / e.path for e in self.manifest.files if e.path.startswith("weights/")]

    def check_device(self, architecture: str) -> None:
        """Refuse a GPU that the engine was not built for (`architecture` such as "sm90")."""
        targets = ", ".join(self.manifest.targets)
        if architecture not in self.manifest.targets:
            raise EngineError(
                f"Engine {self.directory} was built for {targets}; this GPU is {architecture}. "
                f"Rebuild it with: build-engine CHECKPOINT --target {architecture} -o DIR"
            )

    def check_backend(self, backend: str, version: str) -> None:
        """Refuse another TensorRT, or another version of it, than the one that built the plans."""
        manifest = self.manifest
        if (backend, version) != (manifest.backend, manifest.backend_version):
            raise EngineError(
                f"Engine {self.directory} was built by {manifest.backend} {manifest.backend_version}; here is "
                f"{backend} {version}. Install the version it was built by, or rebuild it with: build-engine "
                f"CHECKPOINT --backend {backend} --target {','.join(manifest.targets)} -o DIR"
            )


def read_manifest(directory: Path) -> Manifest:
    """Read and check engine.json. Raises EngineError."""
    path = directory / MANIFEST_NAME
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(
            f"{directory} is not an engine: it has no {MANIFEST_NAME}. Build one with: build-engine CHECKPOINT -o DIR"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} cannot be read: {error}. Copy the engine again or rebuild it.") from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EngineError(
            f"{path} is not an engine manifest of format {_listed(READABLE_FORMATS)}: {where}: {first['msg']}. "
            "Rebuild the engine with this version."
        ) from None
    for name, found, readable in (
        ("engine format", manifest.format_version, READABLE_FORMATS),
        ("weight layout", manifest.layout_version, (LAYOUT_VERSION,)),
    ):
        if found not in readable:
            raise EngineError(
                f"Engine {directory} has {name} {found}, written by {manifest.generator}; this version reads "
                f"{name} {_listed(readable)}. Rebuild the engine."
            )
    return manifest


def _listed(versions: Iterable[int]) -> str:
    return " or ".join(map(str, versions))


def size_problem(directory: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file's presence or size, or None."""
    try:
        size = (directory / entry.path).stat().st_size
    except OSError:
        return f"{entry.path} is missing"
    return None if size == entry.size else f"{entry.path} has {size} bytes, expected {entry.size}"


def damaged_files(directory: Path, manifest: Manifest, progress: Callable[[int], None]) -> Iterator[str]:
    """Hash every file of an engine and yield what is wrong with each that differs from the manifest.

    Args:
        progress: called with the number of bytes read since the last call.
    """
    for entry in manifest.files:
        problem = size_problem(directory, entry)
        if problem:
            progress(entry.size)
            yield problem
            continue
        digest = hashlib.sha256()
        with (directory / entry.path).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress(len(chunk))
        if digest.hexdigest() != entry.sha256:
            yield f"{entry.path} has sha256 {digest.hexdigest()}, expected {entry.sha256}"
