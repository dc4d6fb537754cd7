"""/v1/responses: OpenAI's API with items, as Codex speaks it, and the responses that are kept."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_runtime.errors import UsageError, shown
from flint_runtime.server.chat import ChatApi
from flint_runtime.server.endpoint import GenerationEndpoint, Plan
from flint_runtime.server.errors import ApiError, ErrorReply
from flint_runtime.server.protocol.responses import ResponsesRequest
from flint_runtime.server.response_store import ResponseStore, StoredResponse
from flint_runtime.server.responses_format import ResponsesFormat
from flint_runtime.server.responses_input import chat_request, function_tools, input_items
from flint_runtime.server.service import Service, new_id

_ID = "resp_"


class ResponsesApi:
    """An `endpoint.Api`, with the responses that it keeps."""

    model = ResponsesRequest
    id_prefix = _ID

    def __init__(self) -> None:
        self.store = ResponseStore()
        self.running: WeakValueDictionary[str, ResponsesFormat] = WeakValueDictionary()
        """Responses that are being made, by id. Whoever makes one holds it."""

    def plan(self, service: Service, body: ResponsesRequest, request_id: str) -> Plan:
        """See `endpoint.Api`."""
        body.refuse_unserved()
        earlier = self._earlier(body.previous_response_id)
        plan = ChatApi().plan(service, chat_request(body, earlier), request_id)
        head = _head(service, body)
        _encoded("text, tool_choice", head)
        make_format = partial(
            ResponsesFormat,
            head=head,
            items=_encoded("input", [*earlier, *input_items(body)]) if body.is_stored else b"[]",
            seals=body.seals_reasoning,
            store=self.store.put if body.is_stored else None,
            running=self._remember,
        )
        return replace(plan, make_format=make_format)

    def error_body(self, error: ErrorReply) -> bytes:
        """See `endpoint.Api`."""
        return error.body()

    def stored(self, response_id: str) -> StoredResponse:
        """A response that has ended. Raises ApiError where there is none."""
        found = self.store.get(_checked(response_id, "response_id"))
        if found is None:
            raise _not_found(response_id, "response_id")
        return found

    def _remember(self, form: ResponsesFormat) -> None:
        self.running[form.response_id] = form

    def _earlier(self, response_id: str | None) -> list[Any]:
        """The items of a conversation up to the end of a response. Raises ApiError."""
        if response_id is None:
            return []
        found = self.store.get(_checked(response_id, "previous_response_id"))
        if found is None:
            raise _not_found(response_id, "previous_response_id")
        items: list[Any] = orjson.loads(found.items)
        return items


def response_routes(service: Service) -> list[Route]:
    """The routes of this module."""
    api = ResponsesApi()

    async def get(request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise UsageError("stream must be left out: a response can be streamed only while it is made.")
        running = api.running.get(_id_of(request))
        found = running.now() if running and running.is_stored else api.stored(_id_of(request)).body
        return _json(found, request)

    async def delete(request: Request) -> Response:
        response_id = _id_of(request)
        if not api.store.delete(_checked(response_id, "response_id")):
            running = api.running.get(response_id)
            if running and running.is_stored:
                raise ApiError(400, "A response that is being made must be cancelled first.", param="response_id")
            raise _not_found(response_id, "response_id")
        return _json(orjson.dumps({"id": response_id, "object": "response", "deleted": True}), request)

    async def cancel(request: Request) -> Response:
        running = api.running.get(_id_of(request))
        if running is not None and not running.has_ended:
            for place in service.places:
                if place.requests is running.requests:
                    place.fail(ApiError(409, "The response was cancelled.", code="cancelled"))
                    return _json(running.cancel(), request)
        found = api.stored(_id_of(request)).body
        if orjson.loads(found)["status"] != "cancelled":
            raise ApiError(400, "Cannot cancel a synchronous response that has ended.", param="response_id")
        return _json(found, request)

    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", GenerationEndpoint(service, api), methods=["POST"]),
        Route(one, get, methods=["GET"]),
        Route(one, delete, methods=["DELETE"]),
        Route(one + "/cancel", cancel, methods=["POST"]),
    ]


def _head(service: Service, body: ResponsesRequest) -> dict[str, Any]:
    """The fields of a response that are known before it is made."""
    defaults = service.llm.tokenizer.defaults
    return {
        "id": _ID + new_id(),
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model or service.settings.model_names[0],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.is_stored,
        "temperature": defaults.get("temperature") if body.temperature is None else body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": function_tools(body.tools),
        "top_p": defaults.get("top_p") if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def _encoded(name: str, value: object) -> bytes:
    """A value of a body as JSON, before anything is answered. Raises UsageError where it is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise UsageError(f"{name} must be nested less deeply.") from None


def _id_of(request: Request) -> str:
    found: str = request.path_params["response_id"]
    return found


def _checked(response_id: str, param: str) -> str:
    if not response_id.startswith(_ID):
        raise ApiError(
            400, f"Invalid {param!r}: {shown(response_id)}. Expected an ID that begins with {_ID!r}.", param=param
        )
    return response_id


def _not_found(response_id: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {shown(response_id)} not found. It was never stored (store: false), was deleted, or had to "
        "make room for newer ones.",
        code="response_not_found",
        param=param,
    )


def _json(body: bytes, request: Request) -> Response:
    headers = {"X-Request-Id": request.scope["state"]["request_id"]}
    return Response(body, headers=headers, media_type="application/json")
