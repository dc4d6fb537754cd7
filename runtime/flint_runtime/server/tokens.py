"""/tokenize, /detokenize and /v1/chat/completions/render: prompts without an answer."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_runtime.errors import UsageError
from flint_runtime.server.body import parse_body, read_body
from flint_runtime.server.chat import chat_prompt, request_tools
from flint_runtime.server.protocol.chat import ChatRequest
from flint_runtime.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from flint_runtime.server.service import Service


def token_routes(service: Service) -> list[Route]:
    """The routes of this module."""

    def tokenize(body: bytes) -> dict[str, Any]:
        fields = parse_body(body, TokenizeRequest)
        service.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise UsageError("prompt must be there, or messages, and not both.")
        ids = _encoded(service, fields) if fields.prompt is None else service.llm.tokenizer.encode(fields.prompt)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
        if fields.return_token_strs:
            token_bytes = service.llm.tokenizer.token_bytes
            found["token_strs"] = [token_bytes(token).decode("utf-8", "replace") for token in ids]
        return found

    def detokenize(body: bytes) -> dict[str, Any]:
        fields = parse_body(body, DetokenizeRequest)
        service.check_model(fields.model)
        return {"prompt": service.llm.tokenizer.decode(fields.tokens, skip_special_tokens=False)}

    def render(body: bytes) -> dict[str, Any]:
        fields = parse_body(body, ChatRequest)
        service.check_model(fields.model)
        ids = _encoded(service, fields)
        prompt = service.llm.tokenizer.decode(ids, skip_special_tokens=False)
        return {"model": service.settings.model_names[0], "prompt": prompt, "token_ids": ids}

    def route(path: str, function: Any) -> Route:
        async def answer(request: Request) -> Response:
            service.check_serving()
            body = await read_body(request.scope, request.receive, service.settings.max_body_bytes)
            found = await service.in_thread(lambda: orjson.dumps(function(body)))
            headers = {"X-Request-Id": request.scope["state"]["request_id"]}
            return Response(found, headers=headers, media_type="application/json")

        return Route(path, answer, methods=["POST"])

    return [
        route("/tokenize", tokenize),
        route("/detokenize", detokenize),
        route("/v1/chat/completions/render", render),
    ]


def _encoded(service: Service, fields: ChatRequest) -> list[int]:
    """Token ids of a conversation's prompt."""
    prompt = chat_prompt(service, fields, *request_tools(fields))
    return service.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
