"""Errors as HTTP answers, in OpenAI's shape: the one place where a status is chosen."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from flint_runtime.errors import EngineDeadError, FlintError, ResourceError, UsageError, shown

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""What a refused client is told to wait, in seconds."""
_ARGUMENT = re.compile(
    r"[a-z_][a-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*|\[\d+\])*(?= (?:must|needs|has|is|of|cannot|takes|\"))"
)
"""An argument's name at the start of a message, as our errors begin."""


class ApiError(FlintError):
    """An answer other than 200 that is no bug of ours.

    Attributes:
        status: the HTTP status.
        code: what a program can tell errors apart by; OpenAI's word where it has one.
        param: the field that is wrong.
        retry: whether the same request may succeed later.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry = status, code, param, retry


class AnswerError(FlintError):
    """The engine ended one request with an error; the others go on."""


@dataclass(frozen=True)
class ErrorReply:
    """An error as a client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON of OpenAI's API."""
        content = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": content})

    def anthropic_body(self) -> bytes:
        """The JSON of Anthropic's API, with the wrong field's name as ours has it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        content = {"type": kind, "message": self.message, "param": self.param}
        return orjson.dumps({"type": "error", "error": content})

    def body_for(self, path: str) -> bytes:
        """The JSON in the shape of the API that a path belongs to."""
        return self.anthropic_body() if _ANTHROPIC_PATH in path else self.body()


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def _reply(
    status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
) -> ErrorReply:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorReply(status, message, kind, param, code, {"Retry-After": str(RETRY_AFTER_S)} if retry else {})


def error_reply(error: BaseException) -> ErrorReply:
    """What a client is told of an exception. A bug of ours is logged with its traceback, and told in a few words."""
    if isinstance(error, ApiError):
        return _reply(error.status, str(error), param=error.param, code=error.code, retry=error.retry)
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, UsageError):
        found = _ARGUMENT.match(str(error))
        return _reply(400, str(error), param=found.group() if found else None)
    if isinstance(error, EngineDeadError):
        return _reply(503, str(error), code="engine_dead", retry=True)
    if isinstance(error, ResourceError):
        return _reply(503, str(error), code="no_resources", retry=True)
    if isinstance(error, HTTPException):
        return _reply(error.status_code, str(error.detail))
    if isinstance(error, FlintError):
        return _reply(500, str(error), code="request_failed")
    logger.error("A request failed: a bug of ours.", exc_info=error)
    return _reply(500, "The server failed at this request. Its log says why.", code="internal_error")


def _invalid(error: ValidationError) -> ErrorReply:
    """A body of wrong types: its first field."""
    first: Any = error.errors(include_url=False, include_context=False)[0]
    name = ""
    for part in first["loc"]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper():  # pydantic also names the members of unions
            name += f".{part}" if name else part
    message = first["msg"].removeprefix("Value error, ")
    what = message[0].lower() + message[1:]
    found = "" if first["type"] == "missing" else f"; found {shown(first['input'])}"
    return _reply(400, f"{name or 'The body'} is wrong: {what}{found}.", param=name or None)
