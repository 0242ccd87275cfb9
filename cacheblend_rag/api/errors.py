"""Errors as the OpenAI API has them, one line each, and which error of an engine is which."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from cacheblend_rag.engines.vllm.middleware.bodies import LARGE_BYTES
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EngineUnavailableError,
    MissingExtraError,
    OutOfMemoryError,
    PromptError,
    PromptTooLongError,
    StoreError,
    first_line,
)

logger = logging.getLogger(__name__)

NAMED = re.compile(
    r"[a-z][a-z_.]*(?==)|structured_outputs|(?:response_format|text\.format|tool)[a-z_.]*\b"
)
"""The field that an error begins with."""
PLACES = ("body", "query", "path", "header")
BRANCHES = frozenset({"str", "list", "int", "dict"})
"""Names of a union's branches, which follow a field that they are no part of."""
KNOWN: Sequence[tuple[type[Exception], HTTPStatus, str | None]] = (
    (PromptTooLongError, HTTPStatus.BAD_REQUEST, "context_length_exceeded"),
    (PromptError, HTTPStatus.BAD_REQUEST, None),
    (ConfigError, HTTPStatus.BAD_REQUEST, None),
    (MissingExtraError, HTTPStatus.BAD_REQUEST, None),
    (StoreError, HTTPStatus.CONFLICT, "store"),
    (OutOfMemoryError, HTTPStatus.SERVICE_UNAVAILABLE, "out_of_memory"),
    (EngineUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"),
)
"""The status and the code of an engine's errors."""


def bad_field(param: str, message: str) -> ApiError:
    """Return the error for a field; message: what is wrong with it, and how to change it."""
    return ApiError(HTTPStatus.BAD_REQUEST, f"{param} {message}", param=param)


def of_engine(error: Exception, prompt_field: str | None = None) -> ApiError:
    """Return the error that a client gets for an exception.

    prompt_field: the field of the body that holds the prompt, if one does. Errors of the server
    itself are logged with their traceback, and told in general words.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return of_validation(error.errors())
    said = first_line(error)
    for kind, status, code in KNOWN:
        if isinstance(error, kind):
            named = NAMED.match(said) if status == HTTPStatus.BAD_REQUEST else None
            param = named and named.group()
            if isinstance(error, PromptError) and not (param or "").startswith("tool"):
                param = prompt_field
            return ApiError(status, said, param=param, code=code)
    logger.error("a request failed", exc_info=error)
    told = said if isinstance(error, CacheBlendError) else "the server failed; its log says why"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, told)


def of_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for the first field that a request has wrong, as pydantic tells of it."""
    meant = _meant(problems)
    first, kind = meant[0], meant[0]["type"]
    why = " or ".join(one["msg"] for one in meant).replace("or Input should be", "or")
    place = [part for part in first["loc"] if part not in PLACES]
    if kind == "json_invalid":
        return ApiError(HTTPStatus.BAD_REQUEST, "the body must be JSON in UTF-8")
    if kind == "value_error":  # our own, which names the field itself
        said = why.removeprefix("Value error, ")
        named = re.match(r"[a-z_]+(?:\.\d+)?(?= (?:is|has|are|hold)\b)", said)
        return ApiError(HTTPStatus.BAD_REQUEST, said, param=named and named[0])
    if not place:
        return ApiError(
            HTTPStatus.BAD_REQUEST,
            "the body must be a JSON object, sent with 'Content-Type: application/json'",
        )
    field = ".".join(str(part) for part in place if not _is_branch(part))
    if kind == "too_long" and isinstance(most := first["ctx"].get("max_length"), int):
        return bad_field(field, f"has too many entries: send at most {most}")
    if kind == "extra_forbidden":
        field = str(place[0])[:100]
    return bad_field(field, "is missing: give it" if kind == "missing" else f"is invalid: {why}")


def _meant(problems: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what is wrong with the first field: of a union, in the branches that read furthest."""
    first = [*takewhile(lambda part: not _is_branch(part), problems[0]["loc"])]
    of_branch: dict[Any, tuple[Any, Mapping[str, Any]]] = {}
    for one in problems:
        path = [part for part in one["loc"] if not _is_branch(part)]
        if path[: len(first)] == first:
            read = path, not one["type"].endswith("_type")  # else it has not begun to read it
            of_branch.setdefault(tuple(filter(_is_branch, one["loc"])), (read, one))
    furthest = max(read for read, _ in of_branch.values())
    return [one for read, one in of_branch.values() if read == furthest]


def _is_branch(part: str | int) -> bool:
    """Whether an element of pydantic's error location names a branch of a union."""
    return part in BRANCHES or not re.fullmatch(r"[a-z_]+|\d+", str(part))


class OneLineRoute(APIRoute):
    """Answers every exception with OpenAI's error object, and reads large bodies in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler of the route, which answers every exception as well."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(_BodyRequest(request.scope, request.receive))
            except HTTPException:
                raise
            except Exception as error:
                return of_engine(error).response()

        return answer


class _BodyRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LARGE_BYTES:
            return await super().json()
        return await asyncio.to_thread(json.loads, body)


def install(app: FastAPI) -> None:
    """Let an application answer HTTP's own errors in this form; others, see OneLineRoute."""

    async def other(request: Request, error: Any) -> Response:
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return _other_method(app, request)
        is_missing = error.status_code == HTTPStatus.NOT_FOUND
        told = f"there is no path {request.url.path!r:.100}" if is_missing else str(error.detail)
        return ApiError(HTTPStatus(error.status_code), told).response()

    app.add_exception_handler(HTTPException, other)


def _other_method(app: FastAPI, request: Request) -> Response:
    """Answer OPTIONS, or a method that a path does not take, with those that it takes."""
    matching = (one for one in app.routes if one.matches(request.scope)[0] is not Match.NONE)
    known = {name for one in matching for name in getattr(one, "methods", None) or ()}
    takes = ", ".join(sorted({*known, "OPTIONS"}))
    if request.method == "OPTIONS":
        return Response(status_code=HTTPStatus.NO_CONTENT, headers={"allow": takes})
    told = f"{request.url.path!r:.100} takes {takes}, not {request.method}"
    return ApiError(HTTPStatus.METHOD_NOT_ALLOWED, told).response(allow=takes)
