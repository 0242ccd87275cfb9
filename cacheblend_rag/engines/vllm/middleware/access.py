"""Access middleware: checks every request of a server before the server reads it.

vLLM's own key guards only some paths, and vLLM accepts bodies of any size and depth; deep ones can
crash it. This ASGI middleware runs first; ``cacheblend-rag serve`` adds it by itself,
``vllm serve`` with ``--middleware`` and its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from cacheblend_rag.engines.vllm.middleware.bodies import (
    BodyReader,
    check_body,
    end_at_first_errors,
)
from cacheblend_rag.engines.vllm.middleware.keys import (
    DEFAULT_NAMESPACE,
    JOBS,
    RELEASES,
    STORERS_PATH,
    STORERS_STATE,
    Grant,
    ServerKeys,
    lacks_store_key,
    refusal,
)
from cacheblend_rag.engines.vllm.namespaces import carry, current
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import CacheBlendError

OPEN_PATH = "/health"
OPEN_STATE = "cacheblend_open_paths"
"""The field of an application's state that holds further paths for everybody: of its page."""
GRANT = "cacheblend_grant"
"""The field of a request's scope that holds what its key allows, a Grant."""
FORM_PATHS = "/v1/audio/"
"""They take forms; all others take JSON, whatever it is called."""
POLICY_VIOLATION = 1008


class AccessMiddleware:
    """Passes requests to ``app`` if they carry the key and their bodies are small and flat.

    The keys of vLLM (``--api-key``, or VLLM_API_KEY) and CACHEBLEND_STORE_KEY give access to every
    path; if vLLM has no key, none is needed, but only requests to this machine's loopback, to the
    host where vLLM listens and to those in CACHEBLEND_ALLOWED_HOSTS are passed, and only of their
    own pages (see ``keys``). If CACHEBLEND_STORE_KEY is set, the paths below STORERS_PATH need
    it, and so do the jobs that change the store. The path /health is always open, and so are
    OPTIONS requests, which browsers send first, and those of OPEN_STATE.

    With CACHEBLEND_TENANTS, a file (see ``keys``), a key decides the namespace of its requests:
    those above are the namespace ``default``. Then a key is always needed.

    Raises ConfigError when CACHEBLEND_MAX_BODY_MIB is no positive number, or the file of tenants is
    wrong.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._keys, self._bodies = app, ServerKeys(), BodyReader()
        self._knows_routes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request (ASGI)."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        if not self._knows_routes:  # a server adds them after its middleware
            end_at_first_errors(getattr(scope["app"], "routes", ()))
            self._knows_routes = True
        request = HTTPConnection(_usual(scope))
        async with AsyncExitStack() as held:
            try:
                granted = self._granted(request)
                if _path(request).startswith(f"{STORERS_PATH}/"):
                    _check_stores(request, granted)
                if self._keys.tenants is not None:
                    held.enter_context(_named(request, granted.namespace))
                if scope["type"] == "http" and not _is_open(request):  # nobody reads a body there
                    receive = await self._checked_body(request, receive, held)
                passed = {**self._with_vllms_key(request), GRANT: granted}
                await self._app(passed, receive, send)
            except ApiError as error:
                await _refuse(error, scope, receive, send)

    def _granted(self, request: HTTPConnection) -> Grant:
        """Return the access that a request's key grants; raises ApiError for a wrong one."""
        own, path = self._vllms_keys(request), _path(request)
        needs_key = bool(own) or self._keys.tenants is not None
        if not needs_key and path != OPEN_PATH:
            _check_hosts(request)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.encode("latin-1") if scheme.lower() == "bearer" else b""
        granted = self._keys.grant(given, own)
        if granted is None and needs_key and not _is_open(request):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "a key is needed (Bearer)")
        granted = granted or Grant(DEFAULT_NAMESPACE, may_change=not self._keys.store_key)
        if not granted.may_ask(path) and not _is_open(request):
            raise ApiError(
                HTTPStatus.FORBIDDEN, "this path is for all tenants: the server's own key is needed"
            )
        return granted

    async def _checked_body(
        self, request: HTTPConnection, receive: Receive, held: AsyncExitStack
    ) -> Receive:
        """Read and check the body; returns an ASGI ``receive`` that gives it to the route again.

        held: a large body occupies one of few places until this is closed.
        """
        body, end = await self._bodies.read(request.headers, receive, held)
        if not _path(request).startswith(FORM_PATHS):
            await check_body(body)
        events = [end or {"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return events.pop() if events else await receive()

        return replay

    def _vllms_keys(self, request: HTTPConnection) -> list[str]:
        """Return the keys that vLLM was started with; its flag overrides the environment."""
        flags = getattr(request.app.state.args, "api_key", None)
        return [key for key in (flags or [self._keys.asking_key]) if key]

    def _with_vllms_key(self, request: HTTPConnection) -> Scope:
        """Return a request that was let in for vLLM, which checks its own key again."""
        scope, keys = request.scope, self._vllms_keys(request)
        if not keys or _is_open(request):
            return scope
        others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        return {**scope, "headers": [*others, (b"authorization", f"Bearer {keys[0]}".encode())]}


@contextmanager
def _named(request: HTTPConnection, namespace: str) -> Iterator[None]:
    """Have what vLLM does for a request know its namespace."""
    try:
        carry(getattr(request.app.state, "engine_client", None))
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


def _path(request: HTTPConnection) -> str:
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))


def _is_open(request: HTTPConnection) -> bool:
    path, of_page = _path(request), getattr(request.app.state, OPEN_STATE, ())
    return path == OPEN_PATH or path in of_page or request.scope.get("method") == "OPTIONS"


def _check_hosts(request: HTTPConnection) -> None:
    told = request.app.state.args
    origins = getattr(told, "allowed_origins", None) or ()  # vLLM's own; all by default
    why = refusal(request.headers, getattr(told, "host", None), origins)
    if why is not None:
        raise ApiError(HTTPStatus.FORBIDDEN, why)


def _check_stores(request: HTTPConnection, granted: Grant) -> None:
    """Refuse a request of who stores without the right key, or where nobody answers it."""
    is_for_all = _path(request) == JOBS or request.scope.get("method") == "OPTIONS"
    if not granted.may_change and not is_for_all:
        what = "release" if _path(request) == RELEASES else "see or change documents"
        raise lacks_store_key(what)
    if getattr(request.app.state, STORERS_STATE, None) is None:
        raise ApiError(
            HTTPStatus.NOT_IMPLEMENTED,
            "documents need the endpoint plugin cacheblend: use cacheblend-rag serve, or set "
            "VLLM_PLUGINS=cacheblend",
        )


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocketClose(POLICY_VIOLATION, str(error))(scope, receive, send)
    else:
        await error.response(connection="close")(scope, receive, send)
