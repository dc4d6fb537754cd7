"""Boundary: what every request passes first. Its id, its key, and a last catch for errors."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from flint_runtime.server.body import ClientGoneError
from flint_runtime.server.errors import ApiError, error_reply
from flint_runtime.server.replies import send_error
from flint_runtime.server.service import new_id, usable_id

_OPEN = ("/health", "/ping", "/")
_OPEN_FOLDER = "/static/"
"""The page's files."""


class Boundary:
    """ASGI middleware, without a layer around `send`: a stream passes it for every token."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], root_path: str) -> None:
        self._app, self._root_path = app, root_path.rstrip("/")
        self._keys = [sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Routes are found behind it where a path begins with it: some proxies pass it on, others do not.
        scope["root_path"] = self._root_path
        headers = dict(scope["headers"])
        given = usable_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        state = scope.setdefault("state", {})
        state["request_id"], state["id_was_given"] = given or new_id(), given is not None
        try:
            self._check_key(scope, headers)
            await self._app(scope, receive, send)
        except ClientGoneError:
            pass
        except Exception as error:
            with suppress(RuntimeError):  # the answer has begun
                await send_error(scope, send, error_reply(error))

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError unless the request has one of the keys, or needs none."""
        if not self._keys:
            return
        path = scope["path"]
        if path.startswith(f"{self._root_path}/"):
            path = path[len(self._root_path) :]
        if path in _OPEN or (path.startswith(_OPEN_FOLDER) and ".." not in path):
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [token.strip()] if scheme.lower() == b"bearer" else []
        given.append(headers.get(b"x-api-key", b""))
        # Every key is compared to its end, and digests are of one length: the time tells nothing.
        found = [hmac.compare_digest(sha256(one).digest(), key) for one in given for key in self._keys]
        if not any(found):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY, or as x-api-key: KEY.",
                code="invalid_api_key",
            )
