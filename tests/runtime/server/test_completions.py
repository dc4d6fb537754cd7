"""/v1/completions: what comes back, streamed and whole, over a core that answers from a script."""

from __future__ import annotations

from typing import Any

import pytest

from flint_runtime.request import CoreOutput, EngineRequest, TokenOutput
from tests.runtime.fake_core import EOS, TOKENIZER, FakeCore
from tests.runtime.server.serving import MODEL, Served, says

PROMPT = "7 + 5 is"


@pytest.fixture(autouse=True)
def _answer(core: FakeCore) -> None:
    core.answer = says(" 12, I think.")


@pytest.fixture
def prompt_logprobs(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the core report the prompt, too."""
    step = FakeCore._next

    def next_with_prompt(self: FakeCore, request: EngineRequest, left: list[int]) -> CoreOutput:
        first = request.scheduled is None
        output = step(self, request, left)
        if not first or request.params.prompt_logprobs is None:
            return output
        tokens = [TokenOutput(token, -1.5, (token, 1), (-1.5, -3.0), 1) for token in request.prompt[1:]]
        return output._replace(prompt_logprobs=(None, *tokens))

    monkeypatch.setattr(FakeCore, "_next", next_with_prompt)


def text(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_whole_and_streamed(server: Served) -> None:
    body = server.complete(prompt=PROMPT, max_tokens=50).json()
    assert body["object"] == "text_completion" and body["model"] == MODEL and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": " 12, I think.", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    chunks = server.stream("/v1/completions", prompt=PROMPT, max_tokens=50, stream_options={"include_usage": True})
    assert text(chunks) == " 12, I think." and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == body["usage"] and len({(c["id"], c["created"]) for c in chunks}) == 1


def test_sixteen_tokens_unless_more_are_asked_for(server: Served, core: FakeCore) -> None:
    core.answer = lambda request: [5] * 500
    assert server.complete(prompt=PROMPT).json()["usage"]["completion_tokens"] == 16
    assert server.complete(prompt=PROMPT, max_tokens=None).json()["usage"]["completion_tokens"] == 500


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a b", 1), (["a b", "c"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), ([[5]], 1), (["a"] * 20, 20)],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_form(server: Served, prompt: Any, count: int, n: int, stream: bool) -> None:
    """The answers of all prompts are numbered through, n to each."""
    if stream:
        chunks = server.stream("/v1/completions", prompt=prompt, n=n)
        assert [text(chunks, index) for index in range(count * n)] == [" 12, I think."] * count * n
        reasons = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert sorted(reasons) == list(range(count * n))
    else:
        choices = server.complete(prompt=prompt, n=n).json()["choices"]
        assert [c["index"] for c in choices] == list(range(count * n))
        assert {c["text"] for c in choices} == {" 12, I think."}


@pytest.mark.usefixtures("prompt_logprobs")
@pytest.mark.parametrize("prompt", [PROMPT, TOKENIZER.encode(PROMPT)])
@pytest.mark.parametrize("max_tokens", [0, 1, 50])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: Served, prompt: Any, max_tokens: int, stream: bool) -> None:
    """The prompt in front, its first token without a logprob; with max_tokens 0 the prompt alone."""
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = [*TOKENIZER.encode(" 12, I think."), EOS][:max_tokens]
    tokens = [*TOKENIZER.encode(PROMPT), *answer]
    if stream:
        choices = [c for chunk in server.stream("/v1/completions", **fields) for c in chunk["choices"]]
        logprobs = {key: [x for c in choices for x in c["logprobs"][key]] for key in choices[0]["logprobs"]}
        found = "".join(choice["text"] for choice in choices)
    else:
        body = server.complete(**fields).json()
        (choice,) = body["choices"]
        logprobs, found = choice["logprobs"], choice["text"]
        assert body["usage"]["completion_tokens"] == len(answer)
        assert choice["finish_reason"] == ("stop" if max_tokens == 50 else "length")
    assert found == TOKENIZER.decode(tokens)
    texts = [TOKENIZER.token_bytes(token).decode() for token in tokens]
    assert logprobs["tokens"] == texts
    assert logprobs["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(texts))]
    prompt_tokens = len(tokens) - len(answer)
    assert logprobs["token_logprobs"] == [None] + [-1.5] * (prompt_tokens - 1) + [-0.5] * len(answer)
    assert logprobs["top_logprobs"][0] is None and all(len(top) == 1 for top in logprobs["top_logprobs"][1:])


@pytest.mark.usefixtures("prompt_logprobs")
def test_prompt_logprobs_by_token_id(server: Served) -> None:
    (choice,) = server.complete(prompt=[5, 6], prompt_logprobs=0, max_tokens=1).json()["choices"]
    expected = {"logprob": -1.5, "rank": 1, "decoded_token": TOKENIZER.token_bytes(6).decode()}
    assert choice["prompt_logprobs"] == [None, {"6": expected}]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(server: Served, stream: bool) -> None:
    answer = [*TOKENIZER.encode(" 12, I think."), EOS]
    if stream:
        choices = [
            c for ch in server.stream("/v1/completions", prompt=[5], return_token_ids=True) for c in ch["choices"]
        ]
        assert choices[0]["prompt_token_ids"] == [5] and [t for c in choices for t in c["token_ids"]] == answer
    else:
        (choice,) = server.complete(prompt=[5], return_token_ids=True).json()["choices"]
        assert choice["token_ids"] == answer and choice["prompt_token_ids"] == [5]


def test_no_logprob_is_infinite(server: Served, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no infinity."""
    minus = float("-inf")
    monkeypatch.setattr(
        FakeCore, "_next", lambda self, request, left: self.running.pop(request.request_id) and CoreOutput(
            request.request_id, (TokenOutput(5, minus, (5, 6), (minus, minus), 1),), "length"
        )
    )  # fmt: skip
    (choice,) = server.complete(prompt="x", logprobs=2).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    (choice,) = server.chat(logprobs=True, top_logprobs=2).json()["choices"]
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0
