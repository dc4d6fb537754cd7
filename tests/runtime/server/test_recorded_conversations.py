"""Conversations render to the token ids that vLLM gave for them; where ours differ, that was decided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.runtime.fake_core import FakeCore
from tests.runtime.server.serving import Served, serving
from tests.tools.conversations import CONVERSATIONS, Conversation
from tests.tools.record_conversations import RECORDED

VLLM = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def servers(shared: tuple[FakeCore, Served]) -> Iterator[dict[str, Served]]:
    """By what conversations ask of a server, as text."""
    llm = shared[1].llm
    found: dict[str, Served] = {}
    with ExitStack() as running:
        for conversation in CONVERSATIONS.values():
            settings = server_settings(conversation)
            if str(settings) not in found:
                found[str(settings)] = running.enter_context(serving(llm, **settings))
        yield found


def server_settings(conversation: Conversation) -> dict[str, Any]:
    return {
        "exclude_tools_when_tool_choice_none": conversation.exclude_tools,
        "default_chat_template_kwargs": conversation.default_kwargs,
    }


def test_what_was_recorded_is_what_is_asked() -> None:
    """Whoever changes a conversation records again: `python -m tests.tools.record_conversations`."""
    assert VLLM["vllm"] == "0.33.0"
    assert {name: entry["body"] for name, entry in VLLM["conversations"].items()} == {
        name: json.loads(json.dumps(conversation.body)) for name, conversation in CONVERSATIONS.items()
    }
    assert len(CONVERSATIONS) == 40
    assert all("token_ids" in VLLM["conversations"][name] for name, c in CONVERSATIONS.items() if c.differs is None)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_recorded_conversation(servers: dict[str, Served], name: str) -> None:
    conversation, recorded = CONVERSATIONS[name], VLLM["conversations"][name]
    client = servers[str(server_settings(conversation))].client
    answer = client.post("/v1/chat/completions/render", json=conversation.body)
    assert answer.status_code == 200, answer.text
    if conversation.differs is None:
        assert answer.json()["token_ids"] == recorded["token_ids"]
    else:
        assert answer.json()["token_ids"] != recorded.get("token_ids")
        assert conversation.prompt is not None and conversation.prompt in answer.json()["prompt"]
