"""Records what vLLM's stand-alone `vllm-rs render` makes of tests.tools.conversations: token ids for flint-nano.

    python -m tests.tools.record_conversations PATH/OF/vllm-rs

The binary is in vLLM's wheel, as vllm/vllm-rs; it needs no GPU and no Python. Writes
tests/data/conversations/vllm.json: vLLM's version, and by the name of each conversation its body, and `token_ids`, or
`error` where vLLM refuses it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.shapes import NANO_DIRECTORY
from tests.tools.conversations import CONVERSATIONS, Conversation

RECORDED = Path(__file__).resolve().parent.parent / "data" / "conversations" / "vllm.json"
MODEL = "flint-nano"
_PARSERS = ("--tool-call-parser", "glm47", "--reasoning-parser", "glm47")
_SECONDS_TO_START = 30


def main() -> None:
    """Record all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    binary = parser.parse_args().binary
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    found: dict[str, Any] = {}
    by_flags: dict[tuple[str, ...], list[str]] = {}
    for name, conversation in CONVERSATIONS.items():
        by_flags.setdefault(_flags(conversation), []).append(name)
    for flags, names in by_flags.items():
        with _rendering(binary, flags) as client:
            found |= {name: _answer(client, CONVERSATIONS[name]) for name in names}
    refused = [name for name, answer in found.items() if "error" in answer and CONVERSATIONS[name].differs is None]
    if refused:
        sys.exit(f"vLLM refuses {refused[0]!r}: {found[refused[0]]['error']}")
    recorded = {name: {"body": conversation.body, **found[name]} for name, conversation in CONVERSATIONS.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded.items())
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(f'{{"vllm": {json.dumps(version)}, "conversations": {{\n{lines}\n}}}}\n')
    print(f"{len(recorded)} conversations in {RECORDED}")


def _flags(conversation: Conversation) -> tuple[str, ...]:
    flags = ["--exclude-tools-when-tool-choice-none"] if conversation.exclude_tools else []
    if conversation.default_kwargs:
        flags += ["--default-chat-template-kwargs", json.dumps(conversation.default_kwargs)]
    return tuple(flags)


@contextmanager
def _rendering(binary: Path, flags: tuple[str, ...]) -> Iterator[httpx.Client]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    command = [
        str(binary),
        "render",
        str(NANO_DIRECTORY),
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
        *_PARSERS,
        *flags,
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                _wait(client, process)
                yield client
        finally:
            process.terminate()
            process.wait()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while True:
        try:
            client.get("/health")
            return
        except httpx.ConnectError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _answer(client: httpx.Client, conversation: Conversation) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions/render", json={"model": MODEL, **conversation.body})
    found = answer.json()
    if answer.is_success:
        return {"token_ids": found["token_ids"]}
    return {"error": found["error"]["message"]}


if __name__ == "__main__":
    main()
