"""What `run-engine inspect` and `verify` find out about an engine."""

from __future__ import annotations

from typing import Any

from flint_plugins.library import LibraryError, check_library, library_for_host
from flint_runtime.engine import CURE, Engine
from flint_runtime.errors import EngineError
from flint_runtime.executors.engine_check import check_contents
from flint_runtime.memory import MemoryPlan


def weight_bytes(engine: Engine) -> int:
    """Bytes of the engine's weight files."""
    return sum(entry.size for entry in engine.manifest.files if entry.path.startswith("weights/"))


def describe(engine: Engine) -> dict[str, Any]:
    """An engine's facts as plain data: sizes in bytes, lengths in tokens."""
    manifest = engine.manifest
    memory = MemoryPlan(manifest.model, weight_bytes(engine), manifest.limits)
    context = manifest.limits.max_context
    return {
        "engine": str(engine.directory),
        **manifest.model_dump(exclude={"files", "model"}),
        "model": manifest.model.model_dump(),
        "bytes": sum(entry.size for entry in manifest.files),
        "files": {entry.path: entry.size for entry in manifest.files},
        "gpu_memory": {
            "context": context,
            **memory.components(context),
            "total": memory.total_bytes(context),
            "per_1024_tokens": memory.page_bytes * 16,
            "per_sequence": memory.slot_bytes,
        },
    }


def content_problems(engine: Engine) -> list[str]:
    """What of an engine whose files are whole contradicts its manifest: graphs, weights, RoPE table, plugin library."""
    problems = []
    try:
        check_contents(engine)
    except EngineError as error:
        problems.append(str(error).removesuffix(f". {CURE}"))
    if problem := library_problem(engine):
        problems.append(problem)
    return problems


def library_problem(engine: Engine) -> str | None:
    """What is wrong with the engine's plugin library, or None: it must load and be the version the engine wants.

    On a host of another processor than the engine was built on, this installation's library is looked at.
    """
    manifest = engine.manifest
    try:
        path = library_for_host(engine.library_path)
        info = check_library(path, version=manifest.plugins_version, layout_version=manifest.layout_version)
    except (LibraryError, EngineError) as error:
        return str(error)
    if path != engine.library_path:
        return None  # Which GPUs this host's installation has code for says nothing of the engine.
    missing = [target for target in manifest.targets if target not in info.architectures]
    return f"{engine.library_path} holds no GPU code for {', '.join(missing)}" if missing else None
