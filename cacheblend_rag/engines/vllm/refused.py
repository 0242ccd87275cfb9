"""What a request that is refused, or has failed, is answered: OpenAI's error object."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

LONGEST = 500
"""Characters of a message."""
RETRY_SECONDS = 2
"""``Retry-After`` of a client that came while too many others wait."""
INVALID, FAILED = "invalid_request_error", "server_error"
TYPES = {HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.FORBIDDEN: "permission_error"}


class ApiError(Exception):
    """A request is refused or has failed.

    Args:
        status: the HTTP status; the error's type follows from it.
        message: one line: what is wrong, and how to change it.
        param: the field of the request that is wrong.
        code: a word for programs, such as ``model_not_found``.
    """

    def __init__(
        self, status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {"message", "type", "param", "code"}}``."""
        is_failed = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = TYPES.get(self.status, FAILED if is_failed else INVALID)
        told = {"message": str(self)[:LONGEST], "type": kind}
        return {"error": {**told, "param": self.param, "code": self.code}}

    def response(self, **headers: str) -> Response:
        """Return the answer; headers: further ones."""
        from starlette.responses import JSONResponse

        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["retry-after"] = str(RETRY_SECONDS)
        return JSONResponse(self.body(), self.status, headers)
