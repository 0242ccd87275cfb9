"""Tells which tenant a request belongs to, and keeps tenants' blocks apart in vLLM's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.connector.prefix import set_apart
from cacheblend_rag.engines.vllm.namespaces import are_told_apart, block_mark, namespace_of
from cacheblend_rag.reason import Reason, ReasonCode

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

NO_NAMESPACE = Reason(
    ReasonCode.UNSUPPORTED_REQUEST,
    "the request came past the server's access middleware, so it belongs to no namespace",
)
NOT_FOR_TENANTS = Reason(
    ReasonCode.UNSUPPORTED_REQUEST,
    "release frees the memory of all tenants: use the server's own store key",
)


class Tenants:
    """The namespaces of requests.

    Where keys decide them (``serve --tenants``), the access middleware gives each request its own;
    see ``namespaces``. Elsewhere all have the server's.
    """

    def __init__(self, settings: ConnectorSettings) -> None:
        self.own = settings.namespace
        self.are_told_apart = are_told_apart(tenants=settings.tenants)

    def namespace_of(self, request: Request) -> str | None:
        """Return a request's namespace; None if the access middleware has given it none.

        Nothing may be reused for a request without one.
        """
        return namespace_of(request) if self.are_told_apart else self.own

    def set_apart(self, request: Request, namespace: str | None, block_size: int) -> None:
        """Have a request share vLLM's blocks with its own namespace only.

        Call it before vLLM looks the request up.
        """
        if self.are_told_apart:
            set_apart(request, 0, block_size, block_mark(namespace))
