"""The page at ``/``, a client of this server: full prefill and blend of a prompt, side by side."""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "words.js": ("words.js", "text/javascript"),
}
"""URL path of each static file of the page: its file name and media type."""


def page_router(model: str, *, has_collection: bool) -> APIRouter:
    """Return routes that serve the page's static files; they hold no secrets, so need no API key.

    model: its name for clients. has_collection: whether the server retrieves passages.
    """
    router = APIRouter(include_in_schema=False)
    values = {"{model}": html.escape(model), "{collection}": str(has_collection).lower()}
    for path, (name, kind) in FILES.items():
        text = files(__name__).joinpath(name).read_text("utf-8")
        for mark, value in values.items() if not path else ():
            text = text.replace(mark, value)
        router.add_api_route(f"/{path}", _sender(text, kind))
    return router


def _sender(text: str, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(text, media_type=kind, headers=HEADERS)

    return send
