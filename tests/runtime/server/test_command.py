"""`run-engine serve` as an operator meets it: flags, signals, sockets."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from flint_runtime.cli import app
from tests.command_lines import Ended, invoke
from tests.runtime.server.serving import QUESTION, events, until


def run(*arguments: str | Path) -> Ended:
    return invoke(app, "run-engine", "serve", *arguments)


@contextmanager
def started(engine: Path, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that serves flint-nano, and its address, which its log names."""
    code = "import sys; sys.argv[0] = 'run-engine'; from flint_runtime.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(engine), "--executor", "reference", "--port", "0", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        until(lambda: process.poll() is not None or " at " in log.read_text(), 60)
        address = re.search(r"Serving .* at (\S+)", log.read_text())
        assert address, log.read_text()
        yield process, address[1]
    finally:
        process.kill()
        process.wait()


def test_s11_sigterm_under_load(nano_engine: Path, tmp_path: Path) -> None:
    """What runs is finished, new work is refused with 503, and the exit code is 0."""
    with started(nano_engine, tmp_path / "log", "--served-model-name", "a", "--served-model-name", "b") as (
        process,
        url,
    ):
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b"]
            lines: list[str] = []

            def listen() -> None:
                body = {"prompt": "7 + 5", "max_tokens": 60, "ignore_eos": True, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    lines.extend(response.iter_lines())

            listener = threading.Thread(target=listen)
            listener.start()
            until(lambda: client.get("/load").json()["server_load"] == 1)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            response = client.post("/v1/chat/completions", json={"messages": QUESTION})
            assert response.status_code == 503 and response.headers["retry-after"]
            assert client.get("/health").status_code == 503
            listener.join()
        data = events(iter(lines))
        assert data[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(20) == 0


def test_s11_the_timeout_ends_what_runs(nano_engine: Path, tmp_path: Path) -> None:
    """With an error for every client; a client that does not read holds nothing up."""
    with started(nano_engine, tmp_path / "log", "--shutdown-timeout", "0.3") as (process, url):
        body = {"prompt": "7 + 5", "max_tokens": 490, "ignore_eos": True, "n": 8, "stream": True}
        with httpx.Client(base_url=url, timeout=60) as client, client.stream("POST", "/v1/completions", json=body) as r:
            lines = r.iter_lines()
            next(lines)
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - begin < 10
            data = events(lines)
        assert "shut down" in data[-1]["error"]["message"]


def test_a_unix_socket(nano_engine: Path, tmp_path: Path) -> None:
    """One that a killed server left behind is replaced, one in use is not; it goes with its server."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    with started(nano_engine, tmp_path / "log", "--uds", str(path)) as (process, _):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://flint") as client:
            assert client.get("/health").status_code == 200
        ended = run(nano_engine, "--uds", path)
        assert ended.exit_code == 2 and "cannot listen" in ended.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--tool-call-parser", "hermes"], "glm45, glm47"),
        (["--reasoning-parser", "deepseek_r1"], "glm45, glm47"),
        (["--default-chat-template-kwargs", "[]"], "JSON object"),
        (["--allowed-origins", "*"], "JSON list"),
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
        (["--api-key", ""], "api-key"),
        (["--served-model-name", ""], "served-model-name"),
        (["--port", "99999"], "port"),
        (["--max-queue", "-1"], "max-queue"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--host", "nowhere.invalid"], "cannot listen"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_wrong_flags(tmp_path: Path, arguments: list[str], part: str) -> None:
    """Exit code 2 before anything is opened."""
    ended = run(tmp_path, *arguments)
    assert ended.exit_code == 2 and part in ended.stderr, ended.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = run(tmp_path, "--port", str(taken.getsockname()[1]))
    assert ended.exit_code == 2 and "cannot listen" in ended.stderr and "in use" in ended.stderr


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("- 1", "must map"),
        ("a: [", "not YAML"),
        ("prot: 1", "'prot'"),
        ("port: high", "port"),
        ("config: x", "'config'"),
        ("help: true", "'help'"),
    ],
)
def test_wrong_config_files(tmp_path: Path, source: str, part: str) -> None:
    (tmp_path / "config.yaml").write_text(source)
    ended = run(tmp_path, "--config", tmp_path / "config.yaml")
    assert ended.exit_code == 2 and part in ended.stderr, ended.stderr


def test_flags_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the flags' names; the command line goes before it."""
    from flint_runtime.server import running

    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(running, "run_server", lambda *arguments: seen.append(arguments))
    (tmp_path / "config.yaml").write_text(
        "port: 1234\nhost: 0.0.0.0\nserved-model-name: [a, b]\napi_key: secret\nmax-body-mb: 2\n"
        "exclude-tools-when-tool-choice-none: true\nmax-num-seqs: 3\n"
        "default-chat-template-kwargs: {clear_thinking: false}\n"
    )
    ended = run(tmp_path, "--config", tmp_path / "config.yaml", "--port", "4321")
    assert ended.exit_code == 0, ended.stderr
    _, executor, core, settings, listening = seen[0]
    assert (listening.port, listening.host, executor) == (4321, "0.0.0.0", "auto")  # type: ignore[attr-defined]
    assert core["max_num_seqs"] == 3  # type: ignore[index]
    assert settings.model_names == ("a", "b") and settings.api_keys == ("secret",)  # type: ignore[attr-defined]
    assert settings.default_chat_template_kwargs == {"clear_thinking": False}  # type: ignore[attr-defined]
    assert settings.max_body_bytes == 2 << 20  # type: ignore[attr-defined]
    assert settings.exclude_tools_when_tool_choice_none is True  # type: ignore[attr-defined]


def test_the_published_flags_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flint_runtime.server import running

    monkeypatch.setattr(running, "run_server", lambda *_: None)
    for name in ("glm45", "glm47"):
        flags = ["--enable-auto-tool-choice", "--tool-call-parser", name, "--reasoning-parser", name]
        ended = run(tmp_path, *flags, "--exclude-tools-when-tool-choice-none")
        assert ended.exit_code == 0, ended.stderr
