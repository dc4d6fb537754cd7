"""What is refused: its status, OpenAI's error shape, the field, and that the server lives on."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from flint_runtime.async_llm import AsyncLLM
from tests.runtime.fake_core import FakeCore, fake_engine
from tests.runtime.server.serving import QUESTION, Served, endless, serving, until

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A declared function."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


TOOL = tool("now")


def check(response: httpx.Response, status: int, param: str | None = None) -> str:
    """An error of OpenAI's shape; its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    message: str = body["error"]["message"]
    assert message and body["error"]["type"]
    if param is not None:
        assert str(body["error"]["param"]).startswith(param), body
    return message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"null", b'{"messages": "\xff"}', b'{"messages": "\\ud800"}', b"[" * 100_000]
    + [b'{"messages": [], "temperature": %s}' % number for number in (b"NaN", b"Infinity", b"1e999", b"01")],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_objects(server: Served, path: str, body: bytes) -> None:
    check(server.client.post(path, content=body), 400)
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [100_000]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 4}, "best_of"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"lora_request": {}}, "lora_request"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"structured_outputs": {"calls": {"grammar": "x"}}}, "structured_outputs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_s7_wrong_fields(server: Served, path: str, fields: dict[str, Any], param: str) -> None:
    prompt = {"messages": QUESTION} if "chat" in path else {"prompt": "7"}
    check(server.client.post(path, json={**prompt, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages"),
        ({"messages": IMAGE}, "messages"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"tools": "weather"}, "tools"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [TOOL, tool("x" * 129)]}, "tools[1].function.name"),
        ({"tools": [tool("x", {"description": "x" * 1_000_001})]}, "tools[0].function.parameters"),
        ({"tools": [tool("x", json.loads('{"a":' * 65 + "1" + "}" * 65))]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_wrong_fields_of_a_chat(server: Served, fields: dict[str, Any], param: str) -> None:
    check(server.chat(**fields), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"prompt": "x"}}, "prompt"),
        ({"prompt": [[1], "x", {}]}, "prompt"),
        ({"prompt": [["x"]]}, None),
        ({"prompt": ["x"] * 2049}, "prompt"),
        ({"prompt": [100_000]}, None),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_wrong_fields_of_a_completion(server: Served, fields: dict[str, Any], param: str | None) -> None:
    check(server.complete(**fields), 400, param)


def test_s7_a_prompt_that_is_too_long(server: Served) -> None:
    """The message says both numbers."""
    message = check(server.complete(prompt=[5] * 1000), 400)
    assert "1000 tokens" in message or "1,000 tokens" in message
    message = check(server.chat(messages=[{"role": "user", "content": "word " * 5000}]), 400)
    assert "1,000" in message


def test_s7_names_that_are_not_there(server: Served) -> None:
    check(server.chat(model="gpt-4"), 404, "model")
    check(server.complete(model="gpt-4"), 404, "model")
    check(server.client.get("/v1/models/gpt-4"), 404, "model")
    check(server.client.get("/v1/nothing"), 404)
    check(server.client.get("/v1/chat/completions"), 405)
    check(server.client.post("/health"), 405)


@pytest.fixture
def small(shared: tuple[FakeCore, Served]) -> Any:
    """A server over the same engine that takes bodies of 1 MB."""
    with serving(shared[1].llm, max_body_bytes=1 << 20) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_body_that_is_too_large_is_not_read(small: Served, path: str) -> None:
    """Nor waited for: the answer comes before the body is there."""
    check(small.client.post(path, content=b" " * (1 << 20) + b"{}"), 413)
    where = urlsplit(small.url)
    for header in (b"Content-Length: 9000000000", b"Transfer-Encoding: chunked"):
        with socket.create_connection((where.hostname, where.port), timeout=5) as connection:  # type: ignore[arg-type]
            connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (path.encode(), header))
            if header.startswith(b"T"):
                for _ in range(17):
                    connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_s14_a_full_queue(server: Served, core: FakeCore) -> None:
    """429 with Retry-After at once, whether streamed or not; the ones inside end well."""
    import threading

    endless(core)
    object.__setattr__(server.service.settings, "max_queue", 1)
    server.service._most_running = 1
    try:
        found: list[int] = []
        inside = [
            threading.Thread(target=lambda: found.append(server.complete(max_tokens=300).status_code)) for _ in range(2)
        ]
        for thread in inside:
            thread.start()
        until(lambda: server.service.load == 2)
        for stream in (False, True):
            begin = time.monotonic()
            response = server.chat(stream=stream)
            assert time.monotonic() - begin < 1
            assert "queue" in check(response, 429) and int(response.headers["retry-after"]) >= 1
        for thread in inside:
            thread.join()
        assert found == [200, 200] and server.service.load == 0
        core.answer = lambda request: [5]
        assert server.chat().status_code == 200
    finally:
        server.service._most_running = 16
        object.__setattr__(server.service.settings, "max_queue", None)


def test_s14_too_many_waiting_tokens(core: FakeCore) -> None:
    """A prompt of any length is taken while none waits."""
    never = FakeCore()
    never.step = lambda: time.sleep(0.005) or []  # type: ignore[method-assign, func-returns-value]  # they wait
    with AsyncLLM.from_factory(lambda: fake_engine(never)) as llm, serving(llm, max_queued_tokens=50) as server:
        url = server.url
        with httpx.Client(base_url=url, timeout=0.5) as impatient:
            import threading

            def wait() -> None:
                with pytest.raises(httpx.TimeoutException):
                    impatient.post("/v1/completions", json={"prompt": [5] * 100})

            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: any(place.queued_tokens for place in server.service.places))
            response = server.complete(prompt=[5] * 10)
            assert "100 tokens" in check(response, 429) and response.headers["retry-after"]
            thread.join()


def test_keys(shared: tuple[FakeCore, Served], core: FakeCore) -> None:
    """Several keys, in either header; health and the page need none."""
    with serving(shared[1].llm, api_keys=("one", "zwei-ü")) as server:
        for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "one"}, {"x-api-key": "on"}):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
                response = server.client.request(method, path, json={"messages": QUESTION}, headers=headers)
                check(response, 401)
        for key in (b"Bearer one", b"bearer one", "Bearer zwei-ü".encode()):
            assert server.client.get("/v1/models", headers=[(b"Authorization", key)]).status_code == 200
        assert server.client.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200
        assert server.client.get("/health").status_code == server.client.get("/ping").status_code == 200
        check(server.client.get("/static/../metrics"), 401)
        check(server.client.get("/%73tatic/..%2fmetrics"), 401)


def test_errors_of_ours_are_logged_and_told_shortly(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("flint_runtime.server.chat.request_tools", fail)
    monkeypatch.setattr(type(server.llm), "snapshot", fail)
    for response in (server.chat(), server.chat(stream=True), server.client.get("/server_info")):
        assert "secret" not in check(response, 500)
    assert caplog.text.count("ZeroDivisionError: secret") >= 3
    monkeypatch.undo()
    assert server.chat().status_code == 200


def test_refusals_hold_up_no_stream(server: Served, core: FakeCore) -> None:
    """Every refusal within a second, and no gap of a stream above 50 ms meanwhile (deep, wide and wrong bodies)."""
    import threading

    endless(core)
    deep = b'{"messages": [{"role": "user", "content": ' + b"[" * 1000 + b"]" * 1000 + b"}]}"
    wide = json.dumps({"prompt": [5] * 200_000}).encode()
    text = json.dumps({"messages": [{"role": "user", "content": "word " * 400_000}]}).encode()
    bodies = [b"{" * 1_000_000, deep, wide, text, b'{"n": 5, "messages": [{}]}']
    gaps: list[float] = []

    def listen() -> None:
        with server.client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900, "stream": True}
        ) as r:
            last = time.monotonic()
            for _ in r.iter_raw():
                now = time.monotonic()
                gaps.append(now - last)
                last = now

    listener = threading.Thread(target=listen)
    listener.start()
    until(lambda: len(gaps) > 5)
    slowest = 0.0
    with httpx.Client(base_url=server.url, timeout=10) as client:
        for body in bodies:
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
                begin = time.monotonic()
                response = client.post(path, content=body)
                if path != "/tokenize":  # which takes any length
                    assert response.status_code == 400
                    slowest = max(slowest, time.monotonic() - begin)
    listener.join()
    # Twice the goal: the client and the core share this process and its interpreter lock.
    assert slowest < 1 and sorted(gaps[1:])[-2] < 0.1, (slowest, sorted(gaps)[-5:])
