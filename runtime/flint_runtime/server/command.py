"""`run-engine serve`: its flags. `flint_runtime.server.running`, imported when it is asked for, has what they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flint_runtime.errors import UsageError, foreign_errors, shown
from flint_runtime.executors import ExecutorChoice

_PARSERS = ("glm45", "glm47")
"""vLLM's names for the format that Flint writes. Both are one parser here."""


def _read_config(context: typer.Context, value: Path | None) -> Path | None:
    """Take flags from a file; those of the command line go before them."""
    if value is None:
        return None
    import yaml

    with foreign_errors(f"{value} cannot be read", UsageError, "Pass a YAML file with the flags' names."):
        source = value.read_text("utf-8")
    try:
        found = yaml.safe_load(source) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"{value} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{value} must map flags to values, as in `port: 8000`; found {shown(found)}.")
    known: dict[str, Any] = {}
    for parameter in context.command.params:
        for option in parameter.opts:
            known[option.lstrip("-")] = parameter
    defaults = {}
    for name, given in found.items():
        flag = known.get(str(name).replace("_", "-").lstrip("-"))
        if flag is None or flag.name in ("config", "help"):
            raise UsageError(f"{value} has {shown(name)}, which is no flag. See run-engine serve --help.")
        if isinstance(given, dict):
            given = json.dumps(given)
        if getattr(flag, "multiple", False) and not isinstance(given, list):
            given = [given]
        defaults[flag.name] = given
    context.default_map = {**(context.default_map or {}), **defaults}
    return value


def _parser(flag: str, name: str) -> None:
    if name not in _PARSERS:
        raise UsageError(f"{flag} must be one of {', '.join(_PARSERS)}; found {shown(name)}.")


def serve(
    engine: Annotated[Path, typer.Argument(help="Engine directory.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every IPv4 one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one, which the log names.")] = 8000,
    uds: Annotated[Path | None, typer.Option(help="Unix socket to listen at instead.", show_default=False)] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model, several times for several; default: ENGINE.", show_default=False),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that requests must have, several times for several.", show_default=False),
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path under which a proxy shows this server.")] = "",
    ssl_certfile: Annotated[Path | None, typer.Option(show_default=False)] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(show_default=False)] = None,
    allowed_origins: Annotated[
        str, typer.Option(help="JSON list of the web pages' origins that a browser lets call this server.")
    ] = '["*"]',
    chat_template: Annotated[
        Path | None, typer.Option(help="File that replaces the checkpoint's template.", show_default=False)
    ] = None,
    default_chat_template_kwargs: Annotated[
        str, typer.Option(help='JSON, such as {"clear_thinking": false}; requests go before it.')
    ] = "{}",
    executor: Annotated[ExecutorChoice, typer.Option(help="What runs the graph; see run-engine generate.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer; default: what fits.", show_default=False)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most answers at once; default: the engine's batch.", show_default=False)
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Part of the free GPU memory for the KV cache.")] = 0.9,
    max_queue: Annotated[
        int | None, typer.Option(help="Most answers that wait; more get 429. Default: no limit.", show_default=False)
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens that wait; more get 429.", show_default=False)
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers have after SIGTERM.")
    ] = 30.0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 16,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="As vLLM has it; always on.")
    ] = True,
    tool_call_parser: Annotated[str, typer.Option(help="glm47 or glm45, which are the same here.")] = "glm47",
    reasoning_parser: Annotated[str, typer.Option(help="glm47 or glm45, which are the same here.")] = "glm47",
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        typer.Option(
            "--exclude-tools-when-tool-choice-none", help="Leave tools out of the prompt where tool_choice is none."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with flags, as in `port: 8000`.", show_default=False, is_eager=True, callback=_read_config
        ),
    ] = None,
) -> None:
    """Serve OpenAI's API over HTTP. SIGTERM and Ctrl-C end it once running answers are done, with exit code 0.

    Example: run-engine serve engines/flint-nano-sm120 --executor reference
    """
    from flint_runtime.server.running import Listening, run_server
    from flint_runtime.server.settings import ServerSettings

    _parser("--tool-call-parser", tool_call_parser)
    _parser("--reasoning-parser", reasoning_parser)
    settings = ServerSettings(
        model_names=tuple(served_model_name or [str(engine)]),
        api_keys=tuple(api_key or ()),
        chat_template=_text(chat_template),
        default_chat_template_kwargs=_json("--default-chat-template-kwargs", default_chat_template_kwargs, dict),
        exclude_tools_when_tool_choice_none=exclude_tools_when_tool_choice_none,
        max_queue=max_queue,
        max_queued_tokens=max_queued_tokens,
        max_body_bytes=max_body_mb << 20,
        allowed_origins=tuple(map(str, _json("--allowed-origins", allowed_origins, list))),
        root_path=root_path,
    )
    core = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    listening = Listening(host, port, uds, ssl_certfile, ssl_keyfile, shutdown_timeout)
    run_server(engine, executor, core, settings, listening)


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    with foreign_errors(f"{path} cannot be read", UsageError, "Pass a chat template, a text in UTF-8."):
        return path.read_text("utf-8")


def _json(flag: str, source: str, kind: type) -> Any:
    try:
        found = json.loads(source)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        what = "object" if kind is dict else "list"
        raise UsageError(f"{flag} must be a JSON {what}, found {shown(source)}.")
    return found
