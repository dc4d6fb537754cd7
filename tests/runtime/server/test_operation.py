"""What operators ask: models, health, versions, load, timings, metrics, tokens."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.fake_core import TOKENIZER, FakeCore
from tests.runtime.server.serving import MODEL, QUESTION, Served, endless, serving, until

RENDERED = "[gMASK]<sop><|user|>What is 7 + 5?<|assistant|><think>"


def metrics(server: Served) -> dict[str, float]:
    """Every sample by its name and its labels but the model's."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name + (json.dumps(labels) if labels else "")] = sample.value
    return found


def test_models(shared: tuple[FakeCore, Served]) -> None:
    with serving(shared[1].llm, model_names=("first", "org/second")) as server:
        cards = server.client.get("/v1/models").json()["data"]
        assert [(card["id"], card["object"], card["max_model_len"]) for card in cards] == [
            ("first", "model", 1000),
            ("org/second", "model", 1000),
        ]
        assert server.client.get("/v1/models/org/second").json() == cards[1]
        assert server.chat().json()["model"] == "first"
        assert server.chat(model="org/second").json()["model"] == "org/second"


def test_small_questions(server: Served) -> None:
    assert server.client.get("/health").status_code == server.client.post("/ping").status_code == 200
    assert server.client.get("/version").json()["version"]
    info = server.client.get("/server_info").json()
    assert info["models"] == [MODEL] and info["max_model_len"] == 1000


def test_load_and_gauges_fall_to_their_baseline(server: Served, core: FakeCore) -> None:
    endless(core)
    assert server.client.get("/load").json() == {"server_load": 0}
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 900, "stream": True}
    ):
        until(lambda: server.client.get("/load").json() == {"server_load": 2})
        until(lambda: metrics(server)["vllm:num_requests_running"] == 2)
    until(lambda: server.client.get("/load").json() == {"server_load": 0})
    until(lambda: metrics(server)["vllm:num_requests_running"] == 0)


def test_perf_metrics(server: Served, core: FakeCore) -> None:
    server.service.records.clear()
    server.chat()
    server.chat(stream=True)
    server.complete(prompt=["a", "b"])
    records = server.client.get("/perf_metrics").json()
    assert len(records) == 4 and len({record["request_id"] for record in records}) == 4
    for record in records:
        assert record["finished"] and 0 <= record["queue_time"] <= record["time_to_first_token"] <= record["duration"]
    for _ in range(1000):
        server.service.records.append({})
    server.chat()
    assert len(server.client.get("/perf_metrics").json()) == 1000


def test_metrics(server: Served) -> None:
    """vLLM's names; buckets grow to the count."""
    before = metrics(server)
    usage = server.chat().json()["usage"]
    until(lambda: metrics(server)['vllm:request_success_total{"finished_reason": "stop"}'] > 0)
    after = metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("vllm:generation_tokens_total") == usage["completion_tokens"]
    assert grown("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert grown('vllm:request_success_total{"finished_reason": "stop"}') == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"vllm:{name}_count") == grown(f'vllm:{name}_bucket{{"le": "+Inf"}}') == 1
        buckets = [value for key, value in after.items() if key.startswith(f"vllm:{name}_bucket")]
        assert buckets == sorted(buckets)
    assert grown("vllm:inter_token_latency_seconds_count") == usage["completion_tokens"] - 1
    assert any(name.startswith("vllm:cache_config_info") and '"block_size": "64"' in name for name in after)
    for name in (
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        'flint:pages{"state": "used"}',
        'flint:slots{"state": "all"}',
        "flint:tokens_per_second",
        "process_resident_memory_bytes",
    ):
        assert name in after


def test_the_fuller_pool_counts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = server.llm.snapshot()
    for pages, slots in ((80, 1), (10, 8)):
        found = {**snapshot, "pages": 100, "pages_used": pages, "slots": 10, "slots_used": slots}
        monkeypatch.setattr(type(server.llm), "snapshot", lambda self, found=found: found)
        assert metrics(server)["vllm:kv_cache_usage_perc"] == pytest.approx(0.8)


def test_tokens_there_and_back(server: Served) -> None:
    post = server.client.post
    found = post("/tokenize", json={"prompt": "7 + 5", "return_token_strs": True}).json()
    ids = TOKENIZER.encode("7 + 5")
    assert found == {
        "count": len(ids),
        "max_model_len": 1000,
        "tokens": ids,
        "token_strs": [TOKENIZER.token_bytes(token).decode() for token in ids],
    }
    assert post("/detokenize", json={"tokens": ids}).json() == {"prompt": "7 + 5"}
    chat = post("/tokenize", json={"messages": QUESTION}).json()
    assert post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"] == RENDERED
    assert post("/tokenize", json={"prompt": "x", "messages": QUESTION}).status_code == 400
    assert post("/tokenize", json={}).status_code == 400
    assert post("/detokenize", json={"tokens": [-1]}).status_code == 400


def test_render(server: Served) -> None:
    """The prompt that a chat of the same body gets."""
    body = {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "now"}}]}
    found = server.client.post("/v1/chat/completions/render", json=body).json()
    assert found["token_ids"] == server.chat(**body, return_token_ids=True).json()["prompt_token_ids"]
    assert found["prompt"].startswith('[gMASK]<sop><|system|>\n# Tools\n<tools>\n{"name": "now"')


def test_defaults_and_templates_of_the_server(shared: tuple[FakeCore, Served]) -> None:
    """A request's own chat_template_kwargs go before the server's."""
    tools = [{"type": "function", "function": {"name": "now"}}]

    def prompt(server: Served, **fields: object) -> str:
        body = {"messages": QUESTION, **fields}
        return server.client.post("/v1/chat/completions/render", json=body).json()["prompt"]

    with serving(shared[1].llm, default_chat_template_kwargs={"enable_thinking": False}) as server:
        assert prompt(server).endswith("</think>")
        assert prompt(server, chat_template_kwargs={"enable_thinking": True}).endswith("<think>")
        assert "now" in prompt(server, tools=tools, tool_choice="none")
    with serving(
        shared[1].llm, chat_template="{{ messages[0].content }}!", exclude_tools_when_tool_choice_none=True
    ) as server:
        assert prompt(server) == "What is 7 + 5?!"
    with serving(shared[1].llm, exclude_tools_when_tool_choice_none=True) as server:
        assert "now" not in prompt(server, tools=tools, tool_choice="none")
        assert "now" in prompt(server, tools=tools)


def test_web_pages_may_call(server: Served) -> None:
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    allowed = server.client.options("/v1/chat/completions", headers=asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "*"
    response = server.client.get("/version", headers={"Origin": "http://page"})
    assert response.headers["access-control-allow-origin"] == "*"


def test_behind_a_proxy(shared: tuple[FakeCore, Served]) -> None:
    """With the path that the proxy shows, and without: some strip it."""
    with serving(shared[1].llm, root_path="/flint", api_keys=("k",)) as server:
        for prefix in ("", "/flint"):
            assert server.client.get(f"{prefix}/health").status_code == 200
            assert server.client.get(f"{prefix}/v1/models").status_code == 401
            assert server.client.get(f"{prefix}/v1/models", headers={"x-api-key": "k"}).status_code == 200
