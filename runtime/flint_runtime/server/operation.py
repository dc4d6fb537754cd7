"""What operators and clients ask besides answers: models, health, versions, load, timings, metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_runtime.server.metrics import make_registry
from flint_runtime.server.service import Service

_VERSION = version("flint-tensorrt")


def operation_routes(service: Service) -> list[Route]:
    """The routes of this module."""
    registry = make_registry(service)
    settings, llm = service.settings, service.llm

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "flint",
            "root": settings.model_names[0],
            "parent": None,
            "max_model_len": llm.max_model_len,
        }

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [card(name) for name in settings.model_names]}, request)

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_model(name)
        return _json(card(name), request)

    async def health(request: Request) -> Response:
        service.check_serving()
        return _json({"status": "ok"}, request)

    async def show_version(request: Request) -> Response:
        return _json({"version": _VERSION}, request)

    async def server_info(request: Request) -> Response:
        snapshot = llm.snapshot()
        return _json(
            {
                "version": _VERSION,
                "models": settings.model_names,
                "max_model_len": llm.max_model_len,
                "max_num_seqs": snapshot["slots"],
                "pages": snapshot["pages"],
                "max_queue": settings.max_queue,
                "max_queued_tokens": settings.max_queued_tokens,
                "max_body_bytes": settings.max_body_bytes,
                "default_chat_template_kwargs": settings.default_chat_template_kwargs,
                "default_sampling_params": llm.tokenizer.defaults,
                "exclude_tools_when_tool_choice_none": settings.exclude_tools_when_tool_choice_none,
            },
            request,
        )

    async def load(request: Request) -> Response:
        return _json({"server_load": service.load}, request)

    async def perf_metrics(request: Request) -> Response:
        return _json(list(service.records), request)

    async def metrics(request: Request) -> Response:
        found = await service.in_thread(generate_latest, registry)
        return Response(found, headers={"Content-Type": CONTENT_TYPE_LATEST})

    every: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/health": health,
        "/version": show_version,
        "/server_info": server_info,
        "/load": load,
        "/perf_metrics": perf_metrics,
        "/metrics": metrics,
    }
    routes = [Route(path, answer, methods=["GET"]) for path, answer in every.items()]
    return [*routes, Route("/ping", health, methods=["GET", "POST"])]


def _json(value: object, request: Request) -> Response:
    headers = {"X-Request-Id": request.scope["state"]["request_id"]}
    return Response(orjson.dumps(value), headers=headers, media_type="application/json")
