"""JSON and server-sent events, as they are sent."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from http import HTTPStatus
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def as_json(plain: Any) -> bytes:
    """Return JSON in UTF-8, on one line."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def json_response(
    plain: Any, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON answer."""
    return Response(as_json(plain), status, dict(headers or {}), "application/json")


def event(plain: Any, name: str | None = None) -> bytes:
    """Return one server-sent event; name: its type, if it has one."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (head, as_json(plain))


class EventStream(StreamingResponse):
    """Server-sent events; however the answer ends, what they came from is closed.

    A generator that nobody has read yet would close nothing by itself.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], held: AsyncExitStack) -> None:
        """held: is closed after the events."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        async with self._held, aclosing(self._events):
            await super().__call__(scope, receive, send)
