"""Who may do what at a server: keys by routes, the same of both engines."""

from __future__ import annotations

from tests.contracts.served import ASK, STORE

OPEN, ASKS, STORES, WHOLE, RELEASES = "open", "asks", "stores", "whole server", "releases"
"""Kinds of routes: for everybody, for who asks, for who stores, for the server's own keys, for its
own store key."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
OURS = {
    "/health": OPEN,
    "/version": ASKS,
    "/v1/models": ASKS,
    "/v1/chat/completions": ASKS,
    "/v1/completions": ASKS,
    "/v1/responses": ASKS,
    "/docs": ASKS,
    "/redoc": ASKS,
    "/openapi.json": ASKS,
    "/metrics": WHOLE,
    "/v1/cacheblend/jobs": ASKS,
    "/v1/cacheblend/documents": STORES,
    "/v1/cacheblend/documents/{document_id}": STORES,
    "/v1/cacheblend/stats": STORES,
    "/v1/cacheblend/release": RELEASES,
}
"""Routes that both servers have."""
UNKNOWN = "/no/such/path"
KEYS = {
    "no key": None,
    "a wrong key": "guess",
    "the asking key": ASK,
    "the storing key": STORE,
    "a tenant's asking key": "acme asks",
    "a tenant's storing key": "acme stores",
}
MAY = {
    "no key": {OPEN},
    "a wrong key": {OPEN},
    "the asking key": {OPEN, ASKS, WHOLE},
    "the storing key": {OPEN, ASKS, WHOLE, STORES, RELEASES},
    "a tenant's asking key": {OPEN, ASKS},
    "a tenant's storing key": {OPEN, ASKS, STORES},
}
HOSTS = ("127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "localhost", "LOCALHOST:1", "a.localhost:8")
FOREIGN = (
    *("evil.example:8000", "evil.example", "192.0.2.7:8000", "localhost.evil.example"),
    *("gpu.example.evil.example", "["),
)


def refusal(who: str, kind: str) -> int | None:
    """Return the status with which who has a key is refused; None if it is not."""
    if kind in MAY[who]:
        return None
    return 401 if KEYS[who] in {None, "guess"} else 403
