"""The command `build-engine`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from flint_builder.build import (
    DEFAULT_MAX_BATCH,
    DEFAULT_PREFILL_CHUNK,
    BuildOptions,
    BuildPlan,
    BuildReport,
    build_engine,
    gpus_of,
    plan_build,
)
from flint_builder.checkpoint import WeightsChoice
from flint_builder.targets import BackendChoice, parse_targets
from flint_runtime.command_line import raise_at_sigterm, run
from flint_runtime.console import byte_progress, format_bytes, out, print_json
from flint_runtime.memory import KNOWN_GPUS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_CONTEXTS = (1024, 8192, 32_768, 131_072, 262_144)


@app.command(
    epilog="Exit codes: 0 done, 2 usage, 3 the checkpoint is wrong, 4 target or backend unsupported here, "
    "5 not enough disk, host or GPU memory, 130 Ctrl-C, 1 a bug of ours.",
)
def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A GGUF or safetensors file, a checkpoint directory, or a Hugging Face repo id.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Engine directory to write.", show_default=False)],
    target: Annotated[
        str,
        typer.Option(
            help="GPU architectures, comma-separated: sm120 RTX 50, PRO 6000; sm121 GB10; sm100 B200; sm90 H100, H200."
        ),
    ] = "sm120",
    backend: Annotated[
        BackendChoice,
        typer.Option(
            help="What runs the graph. auto: TensorRT-RTX if it offers the target, else TensorRT, else the plugin host."
        ),
    ] = "auto",
    weights: Annotated[
        WeightsChoice, typer.Option(help="Which weights to take where a checkpoint holds both; auto prefers NVFP4.")
    ] = "auto",
    hf_config: Annotated[
        Path | None,
        typer.Option(help="Directory with config.json, if it is not beside the GGUF.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory with the tokenizer, if it is not with the config.", show_default=False),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Most sequences in one step.")] = DEFAULT_MAX_BATCH,
    max_context: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens; default: the model's.", show_default=False)
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Most tokens in one prefill step.")] = DEFAULT_PREFILL_CHUNK,
    embed_plugins: Annotated[
        bool, typer.Option("--embed-plugins", help="Put the plugin library inside the plans too.")
    ] = False,
    lenient_scales: Annotated[
        bool,
        typer.Option(
            "--lenient-scales", help="Decode invalid NVFP4 block scales as ggml does, instead of refusing them."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything, print what would be built and a memory table; write nothing."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an existing engine, which stays usable until the new one is complete."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one machine-readable report on stdout.")] = False,
) -> None:
    """Build an engine directory from a Flint checkpoint (NVFP4 GGUF or BF16 safetensors). Needs no GPU.

    Example: build-engine ~/flint-nvfp4.gguf --hf-config ~/flint --target sm120 -o engines/flint-nvfp4-sm120
    """
    raise_at_sigterm()
    plan = plan_build(
        BuildOptions(
            checkpoint=checkpoint,
            targets=parse_targets(target),
            output=output,
            backend=backend,
            weights=weights,
            hf_config=hf_config,
            tokenizer=tokenizer,
            max_batch=max_batch,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            embed_plugins=embed_plugins,
            lenient_scales=lenient_scales,
            force=force,
        )
    )
    if dry_run:
        report, show = describe_plan(plan), _print_plan
    else:
        with byte_progress("weights", plan.checkpoint.bytes) as progress:
            report, show = describe_build(plan, build_engine(plan, progress.advance)), _print_build
    if as_json:
        print_json(report)
    else:
        show(plan, report)


def describe_plan(plan: BuildPlan) -> dict[str, Any]:
    """What would be built, as plain data. Sizes in bytes, lengths in tokens."""
    memory, limits = plan.memory, plan.limits
    contexts = [c for c in _CONTEXTS if c < limits.max_context] + [limits.max_context]
    return {
        "checkpoint": plan.checkpoint.source,
        "output": str(plan.options.output),
        "targets": list(plan.options.targets),
        "backend": plan.backend,
        "weights": plan.checkpoint.weights,
        "limits": limits.model_dump(),
        "disk_bytes": plan.output_bytes,
        "gpu_memory": [{"context": c, **memory.components(c), "total": memory.total_bytes(c)} for c in contexts],
        "gpus": [
            {
                "name": gpu.name,
                "architecture": gpu.architecture,
                "memory_bytes": gpu.memory_bytes,
                "target": gpu.architecture in plan.options.targets,
                "largest_context": memory.largest_context(gpu.memory_bytes),
                "sequences_at_8192": _sequences(plan, gpu.memory_bytes, min(8192, limits.max_context)),
            }
            for gpu in KNOWN_GPUS
        ],
    }


def describe_build(plan: BuildPlan, built: BuildReport) -> dict[str, Any]:
    """What was built, as plain data."""
    manifest = built.manifest
    return {
        "engine": str(plan.options.output),
        "targets": list(manifest.targets),
        "backend": manifest.backend,
        "backend_version": manifest.backend_version,
        "weights": manifest.weights,
        "limits": manifest.limits.model_dump(),
        "notes": manifest.notes,
        "bytes": sum(entry.size for entry in manifest.files),
        "files": len(manifest.files),
        "seconds": built.seconds,
    }


def _sequences(plan: BuildPlan, memory_bytes: int, context: int) -> int:
    """Sequences of `context` tokens that fit a card beside the weights, up to the engine's batch."""
    free = memory_bytes - plan.memory.total_bytes(0, 0)
    return max(0, min(plan.limits.max_batch, free // plan.memory.kv_bytes(context)))


def _print_plan(plan: BuildPlan, report: dict[str, Any]) -> None:
    out.print(f"Would build {report['output']} from {report['checkpoint']}:")
    out.print(
        f"  {report['weights']} weights, {plan.backend}, for {', '.join(plan.options.targets)}; "
        f"{format_bytes(report['disk_bytes'])} on disk"
    )
    limits = plan.limits
    out.print(
        f"  up to {limits.max_batch} sequences, {limits.max_context} tokens of context, prefill in steps of "
        f"{limits.prefill_chunk}"
    )
    out.print()
    table = Table(title="GPU memory, one sequence", title_justify="left")
    table.add_column("context")
    rows = report["gpu_memory"]
    names = [name for name in rows[0] if name not in ("context",)]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row['context']:,}", *(format_bytes(row[name]) for name in names))
    out.print(table)
    fits = Table(title="Where it fits (* a target of this engine)", title_justify="left")
    for name in ("card", "memory", "longest context", "sequences of 8K"):
        fits.add_column(name, justify="left" if name == "card" else "right")
    for gpu in report["gpus"]:
        star = " *" if gpu["target"] else ""
        longest = f"{gpu['largest_context']:,}" if gpu["largest_context"] else "does not fit"
        fits.add_row(
            f"{gpu['name']} ({gpu['architecture']}){star}",
            format_bytes(gpu["memory_bytes"]),
            longest,
            str(gpu["sequences_at_8192"]),
        )
    out.print(fits)


def _print_build(plan: BuildPlan, report: dict[str, Any]) -> None:
    timing = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items())
    backend = f"{report['backend']} {report['backend_version']}".strip()
    out.print(f"Built {report['engine']}: {format_bytes(report['bytes'])} in {report['files']} files")
    out.print(f"  {report['weights']} weights, {backend}, for {', '.join(report['targets'])}; {timing}")
    for name, value in report["notes"].items():
        if isinstance(value, int) and value:
            out.print(f"  {name.replace('_', ' ')}: {value}")
    cards = [gpu for gpu in gpus_of(report["targets"]) if plan.memory.largest_context(gpu.memory_bytes)]
    for gpu in cards:
        out.print(f"  {gpu.name}: up to {plan.memory.largest_context(gpu.memory_bytes):,} tokens of context")
    out.print(f'Try it: run-engine generate {shlex.quote(report["engine"])} "Hello!"')


def main() -> NoReturn:
    """Entry point."""
    run(app, "build-engine")
