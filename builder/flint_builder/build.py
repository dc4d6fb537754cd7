"""The build: from a checkpoint to a published engine directory."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from flint_builder.checkpoint import Checkpoint, WeightsChoice, open_checkpoint
from flint_builder.graph import export_graph
from flint_builder.output import check_output, existing_folder
from flint_builder.plan import backend_version, build_plan
from flint_builder.publish import Staging, write_synced
from flint_builder.repack import write_weights
from flint_builder.staged import check_opens
from flint_builder.targets import BackendChoice, choose_backend, find_checked_library
from flint_builder.weights import WeightFile, weight_files
from flint_plugins.layout import LAYOUT_VERSION
from flint_plugins.library import package_version
from flint_runtime.config import ModelConfig
from flint_runtime.console import format_bytes
from flint_runtime.errors import CheckpointError, ResourceError, UsageError, foreign_errors, printable
from flint_runtime.manifest import (
    FORMAT_VERSION,
    LIBRARY_NAME,
    MAX_BATCH,
    MAX_CONTEXT,
    MAX_PREFILL_CHUNK,
    PHASES,
    Backend,
    FileEntry,
    Limits,
    Manifest,
)
from flint_runtime.memory import KNOWN_GPUS, Gpu, MemoryPlan

# Graphs, plans and the manifest are a few MB; leave room for them and the file system's own.
_DISK_MARGIN_BYTES = 64 << 20
_HOST_MEMORY_BYTES = 1 << 30
"""What a build may take at most beside the checkpoint's page cache; see `make bench`."""

DEFAULT_MAX_BATCH = 64
DEFAULT_PREFILL_CHUNK = 8192


@dataclass(frozen=True)
class BuildOptions:
    """What build-engine was asked; see its --help."""

    checkpoint: str
    targets: tuple[str, ...]
    output: Path
    backend: BackendChoice = "auto"
    weights: WeightsChoice = "auto"
    hf_config: Path | None = None
    tokenizer: Path | None = None
    max_batch: int = DEFAULT_MAX_BATCH
    max_context: int | None = None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    embed_plugins: bool = False
    lenient_scales: bool = False
    force: bool = False


@dataclass(frozen=True)
class BuildPlan:
    """Everything that is decided and checked before the first byte is written."""

    options: BuildOptions
    checkpoint: Checkpoint
    backend: Backend
    library: Path
    limits: Limits
    files: tuple[WeightFile, ...]
    memory: MemoryPlan

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files' tensors."""
        return sum(tensor.bytes for file in self.files for tensor in file.tensors)

    @property
    def output_bytes(self) -> int:
        """Upper bound of the engine directory's size."""
        assets = sum(len(content) for content in self.checkpoint.assets.values())
        return self.weight_bytes + self.library.stat().st_size + assets + _DISK_MARGIN_BYTES


@dataclass
class BuildReport:
    """What a build did, for people and for --json."""

    manifest: Manifest
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage."""


def plan_build(options: BuildOptions) -> BuildPlan:
    """Open the checkpoint and check all that can be checked without writing.

    Raises:
        UsageError, CheckpointError, UnsupportedError: see their exit codes.
        ResourceError: no known GPU of a target can hold the engine.
    """
    check_output(options.output, options.force)
    backend = choose_backend(options.backend, options.targets)
    library = find_checked_library(options.targets)
    with _reading(options.checkpoint):
        checkpoint = open_checkpoint(
            options.checkpoint,
            weights=options.weights,
            hf_config=options.hf_config,
            tokenizer=options.tokenizer,
            lenient_scales=options.lenient_scales,
        )
    limits = _limits(options, checkpoint.config)
    files = weight_files(checkpoint.config, checkpoint.weights, checkpoint.router_dtype, limits.max_context)
    checkpoint.check(files)
    weight_bytes = sum(tensor.bytes for file in files for tensor in file.tensors)
    memory = MemoryPlan(checkpoint.config, weight_bytes, limits)
    plan = BuildPlan(options, checkpoint, backend, library, limits, files, memory)
    for target in options.targets:
        _check_fits(memory, target)
    return plan


def build_engine(plan: BuildPlan, progress: Callable[[int], None] = lambda count: None) -> BuildReport:
    """Build and publish an engine.

    Args:
        progress: called with the number of checkpoint bytes read since the last call; they add up to
            `plan.checkpoint.bytes`. May be called from several threads.
    Raises:
        CheckpointError: damage that only reading the data shows.
        ResourceError: not enough disk or memory.
        UsageError: the output exists or is being written.
    """
    options, checkpoint = plan.options, plan.checkpoint
    with _writing(options.output):
        _check_host(plan)
    seconds: dict[str, float] = {}
    with _writing(options.output), Staging(options.output, options.force) as staging:
        directory = staging.directory
        entries: list[FileEntry] = []
        with _timed(seconds, "graph"):
            graphs = {
                phase: export_graph(checkpoint.config, checkpoint.weights, plan.files, plan.limits, phase)
                for phase in PHASES
            }
            for phase, graph in graphs.items():
                entries.append(
                    _write(directory, f"graph/{phase}.onnx", graph.model.SerializeToString(deterministic=True))
                )
        entries.append(_copy(plan.library, directory, LIBRARY_NAME))
        for name, content in checkpoint.assets.items():
            entries.append(_write(directory, name, content))
        if plan.backend != "plugin-host":
            with _timed(seconds, "plan"):
                for phase, graph in graphs.items():
                    data = build_plan(
                        graph.model.SerializeToString(deterministic=True),
                        backend=plan.backend,
                        targets=options.targets,
                        library=plan.library,
                        profiles=[graph.profile],
                        embed_plugins=options.embed_plugins,
                    )
                    entries.append(_write(directory, f"plans/{phase}.plan", data))
        with _timed(seconds, "weights"):
            (directory / "weights").mkdir()
            entries += write_weights(checkpoint, plan.files, directory, progress)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            generator=f"flint-tensorrt {package_version()}",
            model=checkpoint.config,
            weights=checkpoint.weights,
            layout_version=LAYOUT_VERSION,
            targets=options.targets,
            backend=plan.backend,
            backend_version="" if plan.backend == "plugin-host" else backend_version(plan.backend),
            plugins_version=package_version(),
            limits=plan.limits,
            notes={"source": printable(checkpoint.source), **checkpoint.counts},
            files=tuple(entries),
        )
        with _timed(seconds, "publish"):
            check_opens(directory, manifest)
            staging.publish(manifest)
    return BuildReport(manifest, seconds)


def _limits(options: BuildOptions, config: ModelConfig) -> Limits:
    longest = config.max_position_embeddings
    context = longest if options.max_context is None else options.max_context
    for name, value, high in (
        ("--max-batch", options.max_batch, MAX_BATCH),
        ("--max-context", context, min(longest, MAX_CONTEXT)),
        ("--prefill-chunk", options.prefill_chunk, MAX_PREFILL_CHUNK),
    ):
        if not 1 <= value <= high:
            raise UsageError(f"{name} {value} is out of range: this model takes 1 to {high}.")
    return Limits(max_batch=options.max_batch, max_context=context, prefill_chunk=min(options.prefill_chunk, context))


def gpus_of(targets: Sequence[str]) -> list[Gpu]:
    """The known cards of some architectures."""
    return [gpu for gpu in KNOWN_GPUS if gpu.architecture in targets]


def _check_fits(memory: MemoryPlan, target: str) -> None:
    """Raise ResourceError where no known card of the target holds one sequence of the asked context."""
    context = memory.limits.max_context
    gpus = gpus_of([target])
    if not gpus or memory.total_bytes(context) <= max(gpu.memory_bytes for gpu in gpus):
        return
    parts = "; ".join(f"{name} {format_bytes(size)}" for name, size in memory.components(context).items())
    largest = max(gpus, key=lambda gpu: gpu.memory_bytes)
    fitting = memory.largest_context(largest.memory_bytes)
    advice = (
        f"At most {fitting} tokens of context fit: pass --max-context {fitting}, or a smaller --prefill-chunk."
        if fitting
        else "Not even a short context fits: choose another target, or the NVFP4 checkpoint."
    )
    raise ResourceError(
        f"An engine with {context} tokens of context needs {format_bytes(memory.total_bytes(context))} of GPU memory "
        f"({parts}); the largest known {target} card, {largest.name}, has {format_bytes(largest.memory_bytes)}. "
        f"{advice}"
    )


def _check_host(plan: BuildPlan) -> None:
    """Raise ResourceError before the first byte where disk or host memory cannot suffice."""
    folder = existing_folder(check_output(plan.options.output, plan.options.force))
    free = shutil.disk_usage(folder).free
    output_bytes = plan.output_bytes
    if output_bytes > free:
        raise ResourceError(
            f"The engine needs {format_bytes(output_bytes)} of disk at {folder}, {format_bytes(free)} are free. "
            "Free some space, or choose another output directory."
        )
    largest = max(sum(tensor.bytes for tensor in file.tensors) for file in plan.files)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and largest >= limit:
        raise ResourceError(
            f"The engine's largest file needs {format_bytes(largest)}, files may have at most {format_bytes(limit)} "
            "here. Raise the limit of file sizes (ulimit -f)."
        )
    needed = min(_HOST_MEMORY_BYTES, plan.weight_bytes)
    available = available_memory_bytes()
    if needed > available:
        raise ResourceError(
            f"The build needs {format_bytes(needed)} of host memory, {format_bytes(available)} are available. "
            "Close other programs, or build on another machine."
        )


def available_memory_bytes() -> int:
    """Memory that programs can still get without swapping, as Linux estimates it."""
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62  # an old kernel, or a container without /proc, does not tell


def _writing(output: Path) -> AbstractContextManager[None]:
    """What the world does to files that are written, as errors of ours."""
    problem = f"{output} cannot be written (nothing was left there)"
    return foreign_errors(problem, UsageError, "Choose another directory.")


def _reading(checkpoint: str | Path) -> AbstractContextManager[None]:
    """What the world does to files that are read, as errors of ours."""
    return foreign_errors(f"{checkpoint} cannot be read", CheckpointError, "Make it readable, or pass another one.")


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[stage] = round(time.monotonic() - started, 3)


def _write(directory: Path, relative: str, data: bytes) -> FileEntry:
    path = directory / relative
    path.parent.mkdir(exist_ok=True)
    write_synced(path, data)
    return FileEntry(path=relative, size=len(data), blake3=blake3(data).hexdigest())


def _copy(source: Path, directory: Path, relative: str) -> FileEntry:
    return _write(directory, relative, source.read_bytes())


__all__ = ["BuildOptions", "BuildPlan", "BuildReport", "build_engine", "gpus_of", "plan_build"]
