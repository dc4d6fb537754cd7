"""Opening an engine directory: the checks that stand between a person's path and an executor.

Every opening checks engine.json against its digest, every file's size, and the hash of every file of at most
HASHED_BYTES: graphs, plans, the plugin library, tokenizer and templates. `damaged_files` hashes all, weights included.
What the files say is compared with the manifest in `executors.engine_check`.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flint_plugins.layout import LAYOUT_VERSION
from flint_runtime.errors import EngineError
from flint_runtime.hashing import hash_files
from flint_runtime.manifest import (
    ASSET_NAMES,
    DIGEST_FIELD,
    FORMAT_VERSION,
    LIBRARY_NAME,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Phase,
    manifest_digest,
)
from flint_runtime.small_files import json_object, read_small_file

UNFINISHED_SUFFIX = ".building"
"""Ends the name of a build's working directory, which is never an engine."""
HASHED_BYTES = 24 << 20
"""Largest file that is hashed at every opening. A tokenizer of 20 MB is; no layer of the released model is."""

CURE = "Copy the engine again, or build it again with build-engine."
"""Ends the message about a damaged engine."""

_MAX_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class Engine:
    """An opened engine directory: its manifest is whole, its files have their sizes, and small ones their hashes."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: Path) -> Engine:
        """Open an engine directory.

        Raises:
            EngineError: not an engine, an unfinished one, of another format, with a manifest that was changed, or
                with a file that is missing, cut off, damaged, or not of the build.
        """
        directory = directory.absolute()
        if directory.name.endswith(UNFINISHED_SUFFIX):
            raise EngineError(
                f"{directory} is the working directory of a build that has not finished, not an engine. "
                "Run build-engine again: it cleans up after itself."
            )
        manifest = read_manifest(directory)
        problems = [problem for entry in manifest.files if (problem := size_problem(directory, entry))]
        if not problems:
            small = [entry for entry in manifest.files if entry.size <= HASHED_BYTES]
            problems = [*_hash_problems(directory, small, lambda count: None), *_foreign_assets(directory, manifest)]
        if problems:
            raise EngineError(f"Engine {directory} is damaged: {'; '.join(problems[:5])}. {CURE}")
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
    document, digest = _read_document(path)
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise EngineError(
            f"{path} has engine format {version!r:.40}, written by {document.get('generator')!r:.80}; this version "
            f"reads engine format {FORMAT_VERSION}. Build the engine again with build-engine."
        )
    if digest != document.get(DIGEST_FIELD):
        raise EngineError(
            f"{path} was changed after the build: its content has the digest {digest}, and it names "
            f"{document.get(DIGEST_FIELD)!r:.80}. What an engine was built for cannot be changed in this file. {CURE}"
        )
    try:
        manifest = Manifest.model_validate({name: value for name, value in document.items() if name != DIGEST_FIELD})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        where = where if where.isprintable() else ascii(where)
        raise EngineError(
            f"{path} is not an engine manifest of format {FORMAT_VERSION}: {where:.200}: {first['msg']:.500}. {CURE}"
        ) from None
    if manifest.layout_version != LAYOUT_VERSION:
        raise EngineError(
            f"{path} has weight layout {manifest.layout_version}, written by {manifest.generator!r:.80}; this version "
            f"reads weight layout {LAYOUT_VERSION}. Build the engine again with build-engine."
        )
    return manifest


def _read_document(path: Path) -> tuple[dict[str, Any], str]:
    """The JSON object in engine.json, and the digest of its content."""
    try:
        document = json_object(read_small_file(path, _MAX_MANIFEST_BYTES))
        return document, manifest_digest(document)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(
            f"{path.parent} is not an engine: it has no {MANIFEST_NAME}. Build one with: build-engine CHECKPOINT -o DIR"
        ) from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error!s:.500}. {CURE}") from None


def size_problem(directory: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file's presence, kind or size, or None."""
    try:
        status = (directory / entry.path).stat()
    except FileNotFoundError:
        return f"{entry.path} is missing"
    except OSError as error:
        return f"{entry.path} cannot be read ({error.strerror or error})"
    if not stat.S_ISREG(status.st_mode):
        return f"{entry.path} is no file"
    return None if status.st_size == entry.size else f"{entry.path} has {status.st_size} bytes, expected {entry.size}"


def damaged_files(directory: Path, manifest: Manifest, progress: Callable[[int], None]) -> Iterator[str]:
    """Hash every file of an engine and yield what is wrong with each that differs from the manifest.

    Args:
        progress: called with the number of bytes read since the last call, from several threads.
    """
    whole = []
    for entry in manifest.files:
        if problem := size_problem(directory, entry):
            progress(entry.size)
            yield problem
        else:
            whole.append(entry)
    yield from _hash_problems(directory, whole, progress)
    yield from _foreign_assets(directory, manifest)


def _hash_problems(directory: Path, entries: Sequence[FileEntry], progress: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with the content of files, the largest first, so that no core waits for the other at the end."""
    entries = sorted(entries, key=lambda entry: entry.size, reverse=True)
    hashes = hash_files([directory / entry.path for entry in entries], progress)
    for entry, found in zip(entries, hashes, strict=True):
        if isinstance(found, OSError):
            yield f"{entry.path} cannot be read ({found.strerror or found})"
        elif found != entry.blake3:
            yield f"{entry.path} has blake3 {found}, expected {entry.blake3}"


def _foreign_assets(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Files that the runtime would read and the build did not write."""
    listed = {entry.path for entry in manifest.files}
    for name in ASSET_NAMES:
        if name not in listed and (directory / name).exists():
            yield f"{name} is not of this build"
