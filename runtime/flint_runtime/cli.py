"""The command `run-engine`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NoReturn

import typer
from rich.table import Table

from flint_runtime.command_line import run
from flint_runtime.console import byte_progress, err, format_bytes, out, print_json, stream
from flint_runtime.engine import Engine, damaged_files, read_manifest
from flint_runtime.errors import EngineError, FlintError, UsageError, foreign_errors
from flint_runtime.executors import ExecutorChoice
from flint_runtime.server.command import serve

if TYPE_CHECKING:
    from flint_runtime.engine_core import CoreConfig
    from flint_runtime.llm_engine import LLMEngine
    from flint_runtime.sampling_params import SamplingParams

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, as wide as the terminal
    help="Run a Flint engine that build-engine made.",
    epilog="Exit codes: 0 done, 2 usage, 3 the checkpoint is wrong, 4 engine, target or backend unsupported here, "
    "5 not enough disk, host or GPU memory, 130 Ctrl-C, 1 a bug of ours.",
)

EngineArgument = Annotated[Path, typer.Argument(help="Engine directory.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one machine-readable report on stdout.")]

app.command()(serve)


@app.command()
def inspect(engine: EngineArgument, as_json: JsonOption = False) -> None:
    """Print what an engine was built from and for, its files, and the GPU memory it takes."""
    from flint_runtime.inspection import describe

    with _reading(engine):
        report = describe(Engine.open(engine))
    if as_json:
        print_json(report)
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
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a long path is shown whole
    for name, value in rows.items():
        table.add_row(name, str(value))
    out.print(table)


@app.command()
def verify(engine: EngineArgument, as_json: JsonOption = False) -> None:
    """Hash every file of an engine, compare its content with engine.json, load its library; name what is wrong."""
    from flint_runtime.inspection import content_problems

    with _reading(engine):
        manifest = read_manifest(engine)
        total = sum(entry.size for entry in manifest.files)
        with byte_progress("verify", total) as progress:
            problems = list(damaged_files(engine, manifest, progress.advance))
        if not problems:
            problems = content_problems(Engine.open(engine))
    report = {"engine": str(engine), "ok": not problems, "problems": problems}
    if problems:
        raise EngineError(
            f"Engine {engine} is damaged: {'; '.join(problems)}. Copy it again, or rebuild it with build-engine.",
            **report,
        )
    if as_json:
        print_json(report)
    else:
        out.print(f"{engine}: {len(manifest.files)} files, {format_bytes(total)}, all as built.")


def _reading(engine: Path) -> AbstractContextManager[None]:
    """What the world does to an engine while it is opened or read, as errors of ours."""
    return foreign_errors(f"Engine {engine} cannot be read", EngineError, "Copy it again or rebuild it.")


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
    from flint_runtime.sampling_params import SamplingParams

    text = _decoded(_standard_input().read() if prompt == "-" else os.fsencode(prompt), "The prompt")
    if not text.strip():
        raise UsageError("The prompt is empty; pass some text.")
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    config = CoreConfig(max_num_seqs=1, enable_prefix_caching=False)
    with closing(_open(engine, executor, config)) as opened:
        if not raw:
            text = opened.tokenizer.render_chat([{"role": "user", "content": text}], enable_thinking=thinking)
        answer = _answer(opened, text, params, chat=not raw, show=not as_json)
    if as_json:
        print_json({"prompt": text, **answer})


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
    from flint_runtime.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    history: list[dict[str, str]] = []
    # With prefix caching, a turn computes only what is new.
    with closing(_open(engine, executor, CoreConfig(max_num_seqs=1))) as opened:
        for line in _lines():
            try:
                message = _decoded(line, "The message").strip()
                if message == "/exit":
                    return
                if message:
                    turn = {"role": "user", "content": message}
                    prompt = opened.tokenizer.render_chat([*history, turn], enable_thinking=thinking)
                    answer = _answer(opened, prompt, params, chat=True, show=True)
                    history += [turn, {"role": "assistant", "content": answer["text"]}]
            except UsageError as error:  # The context is full, say: a shorter message may still fit.
                if not sys.stdin.isatty():
                    raise
                err.print(f"error: {error}")


def _open(engine: Path, executor: ExecutorChoice, config: CoreConfig) -> LLMEngine:
    from flint_runtime.llm_engine import LLMEngine

    with _reading(engine):
        return LLMEngine.open(engine, executor, config)


def _lines() -> Iterator[bytes]:
    """The lines of standard input, from a terminal or a pipe."""
    source = _standard_input()
    if not source.isatty():
        yield from source
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and a history)
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    with suppress(EOFError):
        while True:
            yield input("> ").encode("utf-8", "surrogateescape")


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise UsageError("Standard input is closed; pass the prompt as an argument, or through a pipe.")
    return sys.stdin.buffer


def _decoded(data: bytes, what: str) -> str:
    with foreign_errors(f"{what} cannot be read", UsageError, "Convert it to UTF-8."):
        return data.decode("utf-8")


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
        stream(text)
    while opened.has_unfinished_requests():
        for output in opened.step():
            (answer,) = output.outputs
            text += answer.text
            token_ids += answer.token_ids
            if show:
                stream(answer.text)
    if answer.error:
        raise FlintError(answer.error)
    if show:
        stream("\n")
        if answer.finish_reason == "length":
            err.print("(stopped at the token limit)")
    return {"text": text, "token_ids": token_ids, "finish_reason": answer.finish_reason}


def main() -> NoReturn:
    """Entry point."""
    run(app, "run-engine")
