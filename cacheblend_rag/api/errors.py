"""Errors of HTTP requests as OpenAI's error object."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EngineUnavailableError,
    PromptError,
    StoreError,
    first_line,
)

LONGEST = 500
INVALID = "invalid_request_error"
CLIENTS = (ConfigError, PromptError)
"""Errors whose cause is the request."""
PLACES = ("body", "query", "path", "header")


class RequestError(Exception):
    """A request is refused.

    Args:
        message: names the field and the fix, in one line.
        param: the field.
        status: of the answer.
        code: a word for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def error_object(message: str, kind: str, *, param: str | None, code: str | None) -> dict[str, Any]:
    """Return OpenAI's error object, with a message of one line."""
    line = " ".join(message.split())[:LONGEST]
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


def answer_to(error: Exception) -> tuple[HTTPStatus, dict[str, Any]]:
    """Return the status and the error object for an error."""
    match error:
        case RequestError():
            kind = INVALID if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
            return error.status, error_object(str(error), kind, param=error.param, code=error.code)
        case RequestValidationError():
            param, message = first_fault(error)
            return HTTPStatus.BAD_REQUEST, error_object(message, INVALID, param=param, code=None)
        case StoreError():
            told = error_object(first_line(error), INVALID, param=None, code="store")
            return HTTPStatus.CONFLICT, told
        case EngineUnavailableError():
            told = error_object(first_line(error), "server_error", param=None, code="unavailable")
            return HTTPStatus.SERVICE_UNAVAILABLE, told
        case _ if isinstance(error, CLIENTS):
            told = error_object(first_line(error), INVALID, param=None, code=None)
            return HTTPStatus.BAD_REQUEST, told
        case CacheBlendError():
            told = error_object(first_line(error), "server_error", param=None, code=None)
            return HTTPStatus.SERVICE_UNAVAILABLE, told
    raise error


def first_fault(error: ValidationError | RequestValidationError) -> tuple[str | None, str]:
    """Return the first wrong field of a request, and what is wrong with it."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"] if part not in PLACES]
    said = str(fault["msg"]).removeprefix("Value error, ")
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    param = ".".join(place) or None
    return param, f"{param}: {said}{more}" if param else f"{said}{more}"
