"""The command `run-engine`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flint_runtime.console import byte_progress, err, fail, format_bytes, out
from flint_runtime.engine import Engine, damaged_files, read_manifest
from flint_runtime.errors import EngineError, FlintError, UsageError
from flint_runtime.executors import ExecutorChoice

if TYPE_CHECKING:
    from flint_runtime.llm_engine import LLMEngine
    from flint_runtime.sampling_params import SamplingParams

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Run a Flint engine that build-engine made.",
    epilog="Exit codes: 0 done, 2 usage, 3 the checkpoint is wrong, 4 engine, target or backend unsupported here, "
    "5 not enough disk, host or GPU memory, 1 a bug of ours.",
)

EngineArgument = Annotated[Path, typer.Argument(help="Engine directory.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one machine-readable report on stdout.")]


@app.command()
def inspect(engine: EngineArgument, as_json: JsonOption = False) -> None:
    """Print what an engine was built from and for, its files, and the GPU memory it takes."""
    from flint_runtime.inspection import describe

    report = describe(Engine.open(engine))
    if as_json:
        print(json.dumps(report, indent=1))
        return
    model, limits, memory = report["model"], report["limits"], report["gpu_memory"]
    built_by = f"{report['backend']} {report['backend_version']}".strip()
    kinds = [kind.removesuffix("_attention") for kind in model["layer_types"]]
    rows = {
        "engine": report["engine"],
        "written by": f"{report['generator']}, plugins {report['plugins_version']}",
        "source": report["notes"].get("source", ""),
        "backend": f"{built_by}, for {', '.join(report['targets'])}",
        "model": f"{model['num_hidden_layers']} layers ({kinds.count('full')} full, {kinds.count('sliding')} sliding "
        f"with window {model['sliding_window']}), hidden size {model['hidden_size']}, {model['num_experts']} experts, "
        f"top {model['num_experts_per_tok']}, vocabulary {model['vocab_size']:,}",
        "weights": f"{report['weights']}, layout {report['layout_version']}",
        "limits": f"{limits['max_batch']} sequences, {limits['max_context']:,} tokens of context, prefill in steps of "
        f"{limits['prefill_chunk']:,}",
        "size": f"{format_bytes(report['bytes'])} in {len(report['files'])} files",
        "GPU memory": f"{format_bytes(memory['total'])} for one sequence of {memory['context']:,} tokens; each further "
        f"1,024 tokens {format_bytes(memory['per_1024_tokens'])}, each sequence {format_bytes(memory['per_sequence'])}",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    out.print(table)


@app.command()
def verify(engine: EngineArgument, as_json: JsonOption = False) -> None:
    """Hash every file of an engine, compare its content with engine.json, load its library; name what is wrong."""
    from flint_runtime.inspection import content_problems

    manifest = read_manifest(engine)
    total = sum(entry.size for entry in manifest.files)
    with byte_progress("verify", total) as progress:
        problems = list(damaged_files(engine, manifest, progress.advance))
    if not problems:
        problems = content_problems(Engine.open(engine))
    if as_json:
        print(json.dumps({"engine": str(engine), "ok": not problems, "problems": problems}, indent=1))
    if problems:
        raise EngineError(
            f"Engine {engine} is damaged: {'; '.join(problems)}. Copy it again, or rebuild it with build-engine."
        )
    if not as_json:
        out.print(f"{engine}: {len(manifest.files)} files, {format_bytes(total)}, all as built.", markup=False)


ExecutorOption = Annotated[
    ExecutorChoice,
    typer.Option(
        help="What runs the graph. tensorrt: a GPU, through the engine's plans. plugin-host: a GPU, without "
        "TensorRT. reference: the CPU, exact and slow. auto: the first of these that can."
    ),
]
ThinkingOption = Annotated[bool, typer.Option(help="Let the model think before it answers.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Most tokens of an answer; default: what the context leaves.", show_default=False)
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy; default: the checkpoint's.", show_default=False)
]
TopPOption = Annotated[float | None, typer.Option(help="Default: the checkpoint's.", show_default=False)]
TopKOption = Annotated[int | None, typer.Option(help="Default: the checkpoint's.", show_default=False)]
MinPOption = Annotated[float | None, typer.Option(help="Default: off.", show_default=False)]
SeedOption = Annotated[int | None, typer.Option(help="Makes the draw reproducible.", show_default=False)]


@app.command()
def generate(
    engine: EngineArgument,
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.", show_default=False)],
    executor: ExecutorOption = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    thinking: ThinkingOption = True,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text, streamed to standard output as it comes.

    Example: run-engine generate engines/flint-nano-sm120 "What is 12 + 7?" --temperature 0
    """
    from flint_runtime.engine_core import CoreConfig
    from flint_runtime.llm_engine import LLMEngine
    from flint_runtime.sampling_params import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("The prompt is empty; pass some text.")
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    config = CoreConfig(max_num_seqs=1, enable_prefix_caching=False)
    with closing(LLMEngine.open(engine, executor, config)) as opened:
        if not raw:
            text = opened.tokenizer.render_chat([{"role": "user", "content": text}], enable_thinking=thinking)
        answer = _answer(opened, text, params, chat=not raw, show=not as_json)
    if as_json:
        print(json.dumps({"prompt": text, **answer}, indent=1, ensure_ascii=False))


@app.command()
def chat(
    engine: EngineArgument,
    executor: ExecutorOption = "auto",
    thinking: ThinkingOption = True,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
) -> None:
    """Talk to the model: one message a line, answers streamed. /exit or the end of the input ends it.

    Example: run-engine chat engines/flint-nano-sm120
    """
    from flint_runtime.engine_core import CoreConfig
    from flint_runtime.llm_engine import LLMEngine
    from flint_runtime.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    history: list[dict[str, str]] = []
    # With prefix caching, a turn computes only what is new.
    with closing(LLMEngine.open(engine, executor, CoreConfig(max_num_seqs=1))) as opened:
        for message in _messages():
            turn = {"role": "user", "content": message}
            prompt = opened.tokenizer.render_chat([*history, turn], enable_thinking=thinking)
            try:
                answer = _answer(opened, prompt, params, chat=True, show=True)
            except UsageError as error:  # The context is full: a shorter message may still fit.
                if not sys.stdin.isatty():
                    raise
                err.print(f"error: {error}", markup=False)
                continue
            history += [turn, {"role": "assistant", "content": answer["text"]}]


def _messages() -> Iterator[str]:
    """The user's messages that are not blank, from a terminal or a pipe, up to /exit."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() line editing and a history)
    while True:
        try:
            message = (input("> ") if sys.stdin.isatty() else input()).strip()
        except EOFError:
            return
        if message == "/exit":
            return
        if message:
            yield message


def _answer(opened: LLMEngine, prompt: str, params: SamplingParams, *, chat: bool, show: bool) -> dict[str, Any]:
    """Answer a prompt: text, token_ids and finish_reason.

    Args:
        chat: the prompt may have opened the thinking part; then the text is to show it whole.
        show: print the text as it comes.
    Raises:
        UsageError: the request cannot be served.
        FlintError: it failed.
    """
    from flint_runtime.sampling_params import RequestOutputKind

    params = replace(params, output_kind=RequestOutputKind.DELTA)
    opened.add_request(opened.prepare("run-engine", prompt, params))
    text = "<think>" if chat and prompt.rstrip().endswith("<think>") else ""
    token_ids: list[int] = []
    if show:
        print(text, end="", flush=True)
    while opened.has_unfinished_requests():
        for output in opened.step():
            (answer,) = output.outputs
            text += answer.text
            token_ids += answer.token_ids
            if show:
                print(answer.text, end="", flush=True)
    if answer.error:
        raise FlintError(answer.error)
    if show:
        print()
        if answer.finish_reason == "length":
            err.print("(stopped at the token limit)")
    return {"text": text, "token_ids": token_ids, "finish_reason": answer.finish_reason}


def main() -> None:
    """Entry point."""
    try:
        app(standalone_mode=True)
    except FlintError as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
