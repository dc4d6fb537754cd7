"""Sending answers: status, headers and body, as bytes."""

from __future__ import annotations

from starlette.types import Scope, Send

from flint_runtime.server.errors import ErrorReply

JSON = (b"content-type", b"application/json")
Headers = list[tuple[bytes, bytes]]


async def start(scope: Scope, send: Send, status: int, headers: Headers) -> None:
    """Send status and headers, the request's id among them."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    every = [*headers, (b"x-request-id", request_id.encode())] if request_id else headers
    await send({"type": "http.response.start", "status": status, "headers": every})


async def send_body(scope: Scope, send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a whole answer."""
    await start(scope, send, status, [*headers, (b"content-length", str(len(body)).encode())])
    await send({"type": "http.response.body", "body": body})


async def send_error(scope: Scope, send: Send, error: ErrorReply, body: bytes | None = None) -> None:
    """Send an error, in the shape of the path's API unless a body is given."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send_body(
        scope, send, error.status, error.body_for(scope["path"]) if body is None else body, [JSON, *headers]
    )
