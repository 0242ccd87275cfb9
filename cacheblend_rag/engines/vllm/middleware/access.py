"""Access middleware: checks every request of a server before the server reads it.

vLLM's own key guards only some paths, and vLLM accepts bodies of any size and depth; deep ones can
crash it. This ASGI middleware runs first; ``cacheblend-rag serve`` adds it by itself,
``vllm serve`` with ``--middleware`` and the name in ``MIDDLEWARE``.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.vllm.middleware.bodies import (
    LARGE_BYTES,
    check_json,
    end_at_first_errors,
    order_in,
)
from cacheblend_rag.engines.vllm.middleware.hosts import refusal
from cacheblend_rag.engines.vllm.middleware.tenants import (
    DEFAULT_NAMESPACE,
    RELEASES,
    STORERS_PATH,
    Grant,
    hash_of,
    read_tenants,
)
from cacheblend_rag.engines.vllm.namespaces import TENANTS_VARIABLE, carry_namespaces, current
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import CacheBlendError, ConfigError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MIDDLEWARE = f"{__name__}.AccessMiddleware"
KEY_VARIABLE = "VLLM_API_KEY"
STORE_KEY_VARIABLE = "CACHEBLEND_STORE_KEY"
BODY_VARIABLE = "CACHEBLEND_MAX_BODY_MIB"
MAX_BODY_MIB = 16
"""A question of a million tokens, sent as token ids, takes about 7."""
BODY_SECONDS = 60.0
OPEN_PATH = "/health"
DOCUMENTS_STATE = "cacheblend_documents"
"""What the endpoint plugin with these paths sets in the application's state."""
GRANT = "cacheblend_grant"
"""The field of a request's scope that holds what its key allows, a Grant."""
AUDIO_PATHS = "/v1/audio/"
"""They take forms, in whose fields no order fits; all others take JSON, whatever it is called."""
MOST_LARGE = 8
"""So many requests with bodies over LARGE_BYTES are held at a time; further ones are refused."""
THROWN_AWAY = 4
"""So many times the longest body is taken of one that is longer, at most."""
POLICY_VIOLATION = 1008


def has_storers() -> bool:
    """Whether a key tells those who may store from those who may only ask."""
    return bool(os.environ.get(STORE_KEY_VARIABLE))


class AccessMiddleware:
    """Passes requests to ``app`` if they carry the key and their bodies are small and flat.

    The keys of vLLM (``--api-key``, or VLLM_API_KEY) and CACHEBLEND_STORE_KEY give access to every
    path; if vLLM has no key, none is needed, but only requests to this machine's loopback, to the
    host where vLLM listens and to those in CACHEBLEND_ALLOWED_HOSTS are passed, and only of their
    own pages (see ``hosts``). If CACHEBLEND_STORE_KEY is set, jobs that change the store (see
    CHANGES) need it, and so do the paths of documents. The path /health is always open, and so are
    OPTIONS requests, which browsers send first.

    With CACHEBLEND_TENANTS, a file (see ``tenants``), a key decides the namespace of its requests:
    those above are the namespace ``default``. Then a key is always needed.

    Raises ConfigError when CACHEBLEND_MAX_BODY_MIB is no positive number, or the file of tenants is
    wrong.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._store_key = os.environ.get(STORE_KEY_VARIABLE, "")
        self._max_body = _max_body()
        self._tenants = _tenants()
        self._large = 0
        self._knows_routes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request (ASGI)."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        if not self._knows_routes:  # a server adds them after its middleware
            end_at_first_errors(getattr(scope["app"], "routes", ()))
            self._knows_routes = True
        scope = _usual(scope)
        with ExitStack() as held:
            try:
                granted = self._granted(scope)
                if _path(scope).startswith(f"{STORERS_PATH}/"):
                    _check_documents(scope, granted)
                if self._tenants is not None:
                    held.enter_context(_named(scope, granted.namespace))
                if scope["type"] == "http" and not _is_open(scope):  # nobody reads a body there
                    receive = await self._checked_body(scope, receive, granted.may_change, held)
                await self._app({**_with_vllms_key(scope), GRANT: granted}, receive, send)
            except ApiError as error:
                await _refuse(error, scope, receive, send)

    def _granted(self, scope: Scope) -> Grant:
        """Return what a request's key allows; raises ApiError for a wrong one."""
        keys, given, path = _keys_of_vllm(scope), _given_key(scope), _path(scope)
        needs_key = bool(keys) or self._tenants is not None
        if not needs_key and path != OPEN_PATH:
            _check_hosts(scope)
        stores = bool(self._store_key) and _is_one_of(given, [self._store_key])
        if not needs_key or _is_open(scope) or stores or _is_one_of(given, keys):
            return Grant(DEFAULT_NAMESPACE, stores or not self._store_key)
        tenant = (self._tenants or {}).get(hash_of(given))
        if tenant is None:
            raise ApiError(HTTPStatus.UNAUTHORIZED, "a key is needed (Bearer)")
        if not tenant.may_ask(path):
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                "this path is for all tenants: the server's own key is needed",
            )
        return tenant

    async def _checked_body(
        self, scope: Scope, receive: Receive, may_change: bool, held: ExitStack
    ) -> Receive:
        """Return what passes on a body that is no danger; held: frees its place among the large."""
        _check_encoding(scope)
        body, last = await self._read(receive, held)

        def check() -> None:
            check_json(body)
            if not may_change and body and (kind := order_in(body)):
                raise _lacks_store_key(kind)

        if not _path(scope).startswith(AUDIO_PATHS):
            if len(body) > LARGE_BYTES:
                await asyncio.to_thread(check)
            else:
                check()
        events = [last or {"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Event:
            return events.pop() if events else await receive()

        return replay

    async def _read(self, receive: Receive, held: ExitStack) -> tuple[bytes, Event | None]:
        """Return the body, or the event that ended it too early.

        After a body that is too long, some more is read and discarded: a client that is still
        sending would not read the answer.
        """
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= THROWN_AWAY * self._max_body:
                    event = await receive()
                    if event["type"] != "http.request":
                        return b"", event
                    part = event.get("body", b"")
                    if size <= LARGE_BYTES < size + len(part):
                        held.enter_context(self._large_body())
                    size, more = size + len(part), event.get("more_body", False)
                    body += part
                    if size > self._max_body:
                        body.clear()
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body took longer than {BODY_SECONDS:.0f} s"
            ) from None
        if size > self._max_body:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is longer than {self._max_body >> 20} MiB ({BODY_VARIABLE})",
            )
        return bytes(body), None

    @contextmanager
    def _large_body(self) -> Iterator[None]:
        """Hold one of the few places of large bodies; raises ApiError without one."""
        if self._large >= MOST_LARGE:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MOST_LARGE} bodies over {LARGE_BYTES >> 20} MiB are being read: try again later",
            )
        self._large += 1
        try:
            yield
        finally:
            self._large -= 1


def _tenants() -> Mapping[str, Grant] | None:
    path = os.environ.get(TENANTS_VARIABLE)
    own = (os.environ.get(name) for name in (KEY_VARIABLE, STORE_KEY_VARIABLE))
    return read_tenants(Path(path), filter(None, own)) if path else None


def _max_body() -> int:
    given = os.environ.get(BODY_VARIABLE, str(MAX_BODY_MIB))
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{BODY_VARIABLE}={given!r} must be a number of at least 1")
    return int(given) << 20


@contextmanager
def _named(scope: Scope, namespace: str) -> Iterator[None]:
    """Have what vLLM does for a request know its namespace."""
    try:
        carry_namespaces(getattr(scope["app"].state, "engine_client", None))
    except CacheBlendError as error:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    marked = current.set(namespace)
    try:
        yield
    finally:
        current.reset(marked)


def _usual(scope: Scope) -> Scope:
    """Return a request with one slash before its path, and GET for HEAD.

    Clients put two slashes there if their base URL ends with one. To HEAD, the server sends no body
    by itself.
    """
    usual = {**scope, "path": re.sub("^/+", "/", scope["path"])}
    if raw := scope.get("raw_path"):
        usual["raw_path"] = re.sub(b"^/+", b"/", raw)
    if scope.get("method") == "HEAD":
        usual["method"] = "GET"
    return usual


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _is_open(scope: Scope) -> bool:
    return _path(scope) == OPEN_PATH or scope.get("method") == "OPTIONS"


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [bytes(value) for header, value in scope["headers"] if header == name]


def _given_key(scope: Scope) -> bytes:
    sent = _headers(scope, b"authorization")
    scheme, _, key = (sent[0] if sent else b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


def _keys_of_vllm(scope: Scope) -> list[str]:
    """Return the keys that vLLM was started with; its flag overrides the environment."""
    flags = getattr(scope["app"].state.args, "api_key", None)
    return [key for key in (flags or [os.environ.get(KEY_VARIABLE)]) if key]


def _is_one_of(given: bytes, keys: Iterable[str]) -> bool:
    """Compare in constant time."""
    return any(tuple(hmac.compare_digest(given, key.encode()) for key in keys))


def _with_vllms_key(scope: Scope) -> Scope:
    """Return a request that was let in for vLLM, which checks its own key again."""
    keys = _keys_of_vllm(scope)
    if not keys or _is_open(scope):
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    return {**scope, "headers": [*others, (b"authorization", f"Bearer {keys[0]}".encode())]}


def _check_hosts(scope: Scope) -> None:
    told = scope["app"].state.args
    origins = getattr(told, "allowed_origins", None) or ()  # vLLM's own; all by default
    why = refusal(scope["headers"], getattr(told, "host", None), origins)
    if why is not None:
        raise ApiError(HTTPStatus.FORBIDDEN, why)


def _check_documents(scope: Scope, granted: Grant) -> None:
    """Refuse a request about documents without the right key, or where nobody answers it."""
    if not granted.may_change and scope.get("method") != "OPTIONS":
        releases = _path(scope) == RELEASES
        raise _lacks_store_key("release" if releases else "see or change documents")
    if getattr(scope["app"].state, DOCUMENTS_STATE, None) is None:
        raise ApiError(
            HTTPStatus.NOT_IMPLEMENTED,
            "documents need the endpoint plugin cacheblend: use cacheblend-rag serve, or set "
            "VLLM_PLUGINS=cacheblend",
        )


def _check_encoding(scope: Scope) -> None:
    sent = _headers(scope, b"content-encoding")
    if any(value.strip().lower() != b"identity" for value in sent):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body is compressed (Content-Encoding): send it as it is",
        )


def _lacks_store_key(kind: str) -> ApiError:
    return ApiError(
        HTTPStatus.FORBIDDEN, f"to {kind}, the key in the server's {STORE_KEY_VARIABLE} is needed"
    )


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        from starlette.websockets import WebSocketClose

        await WebSocketClose(POLICY_VIOLATION, str(error))(scope, receive, send)
    else:
        await error.response(connection="close")(scope, receive, send)
