"""Errors as the OpenAI API has them, one line each, and which error of an engine is which."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cacheblend_rag.api.wire import json_response
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EngineUnavailableError,
    MissingExtraError,
    OutOfMemoryError,
    PromptError,
    PromptTooLongError,
    first_line,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2
"""What a client that came while too many others wait is told to wait."""
TOO_LONG = "context_length_exceeded"
_NAMED = re.compile(r"[a-z][a-z_.]*(?==)|structured_outputs[a-z_.]*")
"""The field that a ConfigError begins with."""
_OF_TOOLS = re.compile(r"tools|tool_choice")
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}


class ApiError(Exception):
    """A request is refused or has failed.

    Args:
        status: the HTTP status.
        message: one line: what is wrong, and how to change it.
        param: the field of the body that is wrong.
        code: a word for programs, such as ``model_not_found``.
    """

    def __init__(
        self, status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of_field(cls, param: str, message: str) -> ApiError:
        """Return the error for a field, told by a message that names it."""
        return cls(HTTPStatus.BAD_REQUEST, message, param=param)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        is_busy = self.status == HTTPStatus.SERVICE_UNAVAILABLE
        return {"retry-after": str(RETRY_SECONDS)} if is_busy else {}

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the answer."""
        return json_response(self.body(), self.status, self.headers)


def bad_field(param: str, message: str) -> ApiError:
    """Return the error for a field; message: what is wrong with it, and how to change it."""
    return ApiError.of_field(param, f"{param} {message}")


def of_engine(error: Exception, prompt_field: str) -> ApiError:
    """Return what a client is told of an engine's error.

    prompt_field: the field of the body that holds the prompt. Errors of the server itself are
    logged with their traceback, and told in general words.
    """
    if isinstance(error, ApiError):
        return error
    said = first_line(error)
    if isinstance(error, PromptTooLongError):
        return ApiError(HTTPStatus.BAD_REQUEST, said, param=prompt_field, code=TOO_LONG)
    if isinstance(error, PromptError):
        named = _OF_TOOLS.match(said)
        param = named.group() if named else prompt_field
        return ApiError(HTTPStatus.BAD_REQUEST, said, param=param)
    if isinstance(error, ConfigError | MissingExtraError):
        named = _NAMED.match(said)
        return ApiError(HTTPStatus.BAD_REQUEST, said, param=named and named.group())
    if isinstance(error, OutOfMemoryError | EngineUnavailableError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, said)
    logger.error("a request failed", exc_info=error)
    told = said if isinstance(error, CacheBlendError) else "the server failed; its log says why"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, told)


def install(app: FastAPI) -> None:
    """Let an application answer every error in this form."""

    async def refused(_: Request, error: Any) -> Response:
        told: Response = error.response()
        return told

    async def invalid(_: Request, error: Any) -> Response:
        return _of_validation(error.errors()).response()

    async def other(request: Request, error: Any) -> Response:
        told = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND:
            told = f"there is no path {request.url.path!r:.100}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            told = f"{request.url.path!r:.100} takes another method than {request.method}"
        return ApiError(HTTPStatus(error.status_code), told).response()

    async def failed(_: Request, error: Exception) -> Response:
        return of_engine(error, "prompt").response()

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(CacheBlendError, failed)


def _of_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for the first field that a body has wrong."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(HTTPStatus.BAD_REQUEST, "the body must be JSON in UTF-8")
    place = [part for part in first["loc"] if part != "body"]
    if not place:
        return ApiError(
            HTTPStatus.BAD_REQUEST,
            "the body must be a JSON object, sent with 'Content-Type: application/json'",
        )
    # Names of a union's branches follow the field; they are no names of fields.
    path = [part for part in place if isinstance(part, int) or re.fullmatch(r"[a-z_]+", str(part))]
    field = ".".join(str(part) for part in path if part not in {"str", "list", "int", "dict"})
    why = str(first["msg"])
    said = "is missing: give it" if first["type"] == "missing" else f"is invalid: {why}"
    return ApiError(HTTPStatus.BAD_REQUEST, f"{field} {said}", param=field)
