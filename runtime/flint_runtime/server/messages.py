"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, as Claude Code speaks it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_runtime.server.body import parse_body, read_body
from flint_runtime.server.chat import ChatApi
from flint_runtime.server.endpoint import GenerationEndpoint, Plan
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.messages_format import MessagesFormat
from flint_runtime.server.messages_input import chat_request
from flint_runtime.server.protocol.messages import CountTokensRequest, MessagesRequest
from flint_runtime.server.service import Service

_CLAUDE = "claude-"
"""Clients of this API have such names built in. All of them mean the model that is served."""


class MessagesApi:
    """An `endpoint.Api`."""

    model = MessagesRequest
    id_prefix = "msg_"

    def plan(self, service: Service, body: MessagesRequest, request_id: str) -> Plan:
        """See `endpoint.Api`."""
        make_format = partial(
            MessagesFormat,
            message_id=request_id,
            model=body.model or service.settings.model_names[0],
            shows_thinking=(body.thinking or {}).get("display") != "omitted",
        )
        return replace(_chat_plan(service, body, request_id), make_format=make_format)

    def error_body(self, error: ErrorReply) -> bytes:
        """See `endpoint.Api`."""
        return error.anthropic_body()


def message_routes(service: Service) -> list[Route]:
    """The routes of this module."""

    def counted(body: bytes) -> bytes:
        (prompt,) = _chat_plan(service, parse_body(body, CountTokensRequest), "count").prompts
        ids = service.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return orjson.dumps({"input_tokens": len(ids)})

    async def count_tokens(request: Request) -> Response:
        service.check_serving()
        body = await read_body(request.scope, request.receive, service.settings.max_body_bytes)
        headers = {"X-Request-Id": request.scope["state"]["request_id"]}
        return Response(await service.in_thread(counted, body), headers=headers, media_type="application/json")

    return [
        Route("/v1/messages", GenerationEndpoint(service, MessagesApi()), methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def _chat_plan(service: Service, body: CountTokensRequest, request_id: str) -> Plan:
    """The plan of the same request to /v1/chat/completions. Raises FlintError."""
    if body.model is not None and not body.model.startswith(_CLAUDE):
        service.check_model(body.model)
    return ChatApi().plan(service, chat_request(body), request_id)
