"""Reading a body: no more of it than the limit allows, and what it says checked away from the event loop."""

from __future__ import annotations

from typing import TypeVar

import orjson
from starlette.types import Receive, Scope

from flint_runtime.server.errors import ApiError
from flint_runtime.server.protocol.common import RequestModel

Model = TypeVar("Model", bound=RequestModel)


class ClientGoneError(Exception):
    """Nobody is there any more who could be answered."""


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """A request's body.

    Args:
        most: bytes of the largest one that is taken; a larger one is refused as soon as that is known.
    Raises:
        ApiError: it is too large.
        ClientGoneError: the client left.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_large(most)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse_body(body: bytes, model: type[Model]) -> Model:
    """A body as the fields it has. May take a while: for a thread.

    Raises:
        ApiError: it is no JSON object.
        pydantic.ValidationError: a field has a wrong type.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"The body must be a JSON object, found a {type(found).__name__}.", code="invalid_json")
    parsed = model.model_validate(found)
    parsed.log_unknown_fields()
    return parsed


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {most:,} bytes, which is this server's limit (--max-body-mb). Send less.",
        code="body_too_large",
    )
