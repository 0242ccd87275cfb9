"""Limits of a request's body, checked before parsing: length, depth, count of values, UTF-8."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticKnownError, SchemaValidator

from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Message, Receive

BODY_VARIABLE = "CACHEBLEND_MAX_BODY_MIB"
MAX_BODY_MIB = 16
"""A question of a million tokens, sent as token ids, takes about 7."""
BODY_SECONDS = 60.0
LARGE_BYTES = 1 << 20
"""Longer bodies are read off the event loop."""
MOST_LARGE = 8
"""So many requests with bodies over LARGE_BYTES are held at a time; further ones are refused."""
THROWN_AWAY = 4
"""So many times the longest body is taken of one that is longer, at most."""
MAX_DEPTH = 64
MOST_VALUES = 1 << 16
"""Entries of a body's lists and maps, all together, besides token ids."""
MOST_TOKENS = 1 << 20
MOST_NAMES = 4096
"""Entries of a map of which each is checked, such as ``logit_bias``."""
TOKEN_FIELDS = frozenset(
    (b"prompt", b"prompt_token_ids", b"token_ids", b"tokens", b"answer", b"reference")
)
"""Fields that may be lists of token ids, or lists of such lists."""
_OF_TOKEN_IDS = b"0123456789,:[]} \t\r\n"
_UNPAIRED = re.compile(
    rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])"
)
"""Half of a character that stands for none by itself, escaped."""
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")


class BodyReader:
    """Reads bodies up to a length, a few large ones at a time.

    Raises ConfigError when CACHEBLEND_MAX_BODY_MIB is no positive number.
    """

    def __init__(self) -> None:
        given = os.environ.get(BODY_VARIABLE, str(MAX_BODY_MIB))
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"{BODY_VARIABLE}={given!r} must be a number of at least 1")
        self._longest = int(given) << 20
        self._large = asyncio.Semaphore(MOST_LARGE)

    async def read(
        self, headers: Headers, receive: Receive, held: AsyncExitStack
    ) -> tuple[bytes, Message | None]:
        """Return a body, or the event that ended it too early; raises ApiError for a bad one.

        held: frees the body's place among the large ones. After a body that is too long, some more
        is read and discarded: a client that is still sending would not read the answer.
        """
        if any(one.strip().lower() != "identity" for one in headers.getlist("content-encoding")):
            raise ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "the body is compressed (Content-Encoding): send it as it is",
            )
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= THROWN_AWAY * self._longest:
                    event = await receive()
                    if event["type"] != "http.request":
                        return b"", event
                    part = event.get("body", b"")
                    if size <= LARGE_BYTES < size + len(part):
                        await self._take_place(held)
                    size, more = size + len(part), event.get("more_body", False)
                    body += part
                    if size > self._longest:
                        body.clear()
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body took longer than {BODY_SECONDS:.0f} s"
            ) from None
        if size > self._longest:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is longer than {self._longest >> 20} MiB ({BODY_VARIABLE})",
            )
        return bytes(body), None

    async def _take_place(self, held: AsyncExitStack) -> None:
        if self._large.locked():
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MOST_LARGE} bodies over {LARGE_BYTES >> 20} MiB are being read: try again later",
            )
        await held.enter_async_context(self._large)


async def check_body(body: bytes) -> None:
    """Raise ApiError for a body that is dangerous; a large one is checked in a thread."""
    if len(body) > LARGE_BYTES:
        await asyncio.to_thread(check_json, body)
    else:
        check_json(body)


def check_json(body: bytes) -> None:
    """Raise ApiError for a body that is too deep, has too many values or invalid text.

    Takes time linear in the body's length, and little memory; vLLM refuses malformed JSON itself.
    """
    if b"\0" in body:
        raise _bad("the body must be JSON in UTF-8")
    plain = body.replace(rb"\\", b"__")
    if rb"\u" in plain and _UNPAIRED.search(plain):
        raise _bad("the body holds an unpaired surrogate")
    plain = plain.replace(rb"\"", b"__")
    if plain.count(b'"') > 4 * MOST_VALUES:  # a value and its name
        raise _too_many()
    parts = plain.split(b'"')
    outside, names = parts[::2], [b"", *parts[1::2]]
    told = b"".join(map(_counted, names, outside))
    values = sum(map(told.count, (b",", b"[", b"{")))
    tokens = b"".join(outside).count(b",") - told.count(b",")
    if values > MOST_VALUES or tokens > MOST_TOKENS:
        raise _too_many()
    left = told.translate(_BRACKETS, _NO_BRACKET)
    for _ in range(MAX_DEPTH):
        before, left = len(left), left.replace(b"[]", b"")  # the innermost
        if len(left) == before:
            break
    if left:
        raise _bad(f"the body is nested deeper than {MAX_DEPTH}, or its brackets do not match")


def _counted(name: bytes, part: bytes) -> bytes:
    """Return the part of a body behind a string, without the commas of a list of token ids."""
    is_field = name in TOKEN_FIELDS and part.lstrip().startswith(b":")
    return part.replace(b",", b"") if is_field and not part.strip(_OF_TOKEN_IDS) else part


def end_at_first_errors(routes: Iterable[Any]) -> None:
    """Let FastAPI's routes check no entry of a list behind a wrong one, and no large map.

    Pydantic would collect an error for each entry, and in a union for each entry and branch: some
    thousand entries would keep the event loop for seconds, also in vLLM's own models.
    """
    for route in routes:
        checked = getattr(getattr(route, "body_field", None), "_type_adapter", None)
        if checked is not None:
            schema = _ending_early(checked.core_schema)
            checked.validator = SchemaValidator(schema, _use_prebuilt=False)


def _ending_early(schema: Any) -> Any:
    """Return a schema of pydantic's core in which lists end at their first error."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_ending_early, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")  # a schema's own; of a map of fields, the field of that name
    kept = ("metadata", "serialization") if isinstance(kind, str) else ()
    found = {name: one if name in kept else _ending_early(one) for name, one in schema.items()}
    match kind:
        case "list" | "set" | "frozenset" | "tuple":
            found["fail_fast"] = True
        case "dict":
            return {"type": "function-before", "function": _FEW_NAMES, "schema": found}
    return found


def _few_names(value: Any) -> Any:
    """Return a map that is not too large to check each entry."""
    if isinstance(value, dict) and len(value) > MOST_NAMES:
        raise PydanticKnownError(
            "too_long",
            {"field_type": "Dictionary", "max_length": MOST_NAMES, "actual_length": len(value)},
        )
    return value


_FEW_NAMES = {"type": "no-info", "function": _few_names}


def _bad(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message)


def _too_many() -> ApiError:
    return _bad(f"the body holds more than {MOST_VALUES} values, or {MOST_TOKENS} token ids")
