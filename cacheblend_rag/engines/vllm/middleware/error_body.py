"""The body of an HTTP error: OpenAI's error object."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

LONGEST = 500
INVALID, FAILED = "invalid_request_error", "server_error"
TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
}


def error_body(
    status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return ``{"error": {"message", "type", "param", "code"}}``, with a message of one line.

    Args:
        status: of the answer; the type follows from it.
        message: what is wrong, and how to change it.
        param: the field of the request that is wrong.
        code: a word for programs, such as ``model_not_found``.
    """
    kind = TYPES.get(status, FAILED if status >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID)
    line = " ".join(message.split())[:LONGEST]
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}
