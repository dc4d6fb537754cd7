"""create_app: the routes, and what holds for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.errors import FlintError
from flint_runtime.server.boundary import Boundary
from flint_runtime.server.chat import ChatApi
from flint_runtime.server.completions import CompletionApi
from flint_runtime.server.endpoint import Api, GenerationEndpoint
from flint_runtime.server.errors import error_reply
from flint_runtime.server.messages import message_routes
from flint_runtime.server.operation import operation_routes
from flint_runtime.server.responses import response_routes
from flint_runtime.server.service import Service
from flint_runtime.server.settings import ServerSettings
from flint_runtime.server.tokens import token_routes

_APIS: dict[str, type[Api]] = {"/v1/chat/completions": ChatApi, "/v1/completions": CompletionApi}


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The server's application; whoever makes it shuts the engine down. `app.state.service` is its `Service`."""
    service = Service(llm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.run())
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    # Without pages of its own: they would load scripts from another host.
    app = FastAPI(title="Flint", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.service = service
    for kind in (FlintError, ValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    for path, api in _APIS.items():
        app.router.routes.append(Route(path, GenerationEndpoint(service, api()), methods=["POST"]))
    for routes in (token_routes, message_routes, response_routes, operation_routes):
        app.router.routes.extend(routes(service))
    app.add_middleware(Boundary, api_keys=settings.api_keys, root_path=settings.root_path)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    reply = error_reply(error)
    headers = {**reply.headers, "X-Request-Id": request.scope["state"]["request_id"]}
    return Response(reply.body_for(request.scope["path"]), reply.status, headers, media_type="application/json")
