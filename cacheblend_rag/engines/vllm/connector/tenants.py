"""Tells which tenant a request belongs to, and keeps tenants' blocks apart in vLLM's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.connector.prefix import set_apart
from cacheblend_rag.engines.vllm.namespaces import (
    FIELD,
    are_told_apart,
    block_mark,
    known_secret,
    read_signed,
)
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

    Where keys decide them (``serve --tenants``), each request has its namespace signed by the
    access middleware; see ``namespaces``. Elsewhere all have the server's.
    """

    def __init__(self, settings: ConnectorSettings) -> None:
        self.own, self._secret = settings.namespace, known_secret()
        self.are_told_apart = are_told_apart(tenants=settings.tenants)

    def namespace_of(self, request: Request) -> str | None:
        """Return a request's namespace; None if nobody entitled has named it.

        Nothing may be reused for a request without one.
        """
        if not self.are_told_apart:
            return self.own
        params = request.sampling_params
        sent = (params.extra_args or {}).get(FIELD) if params is not None else None
        return read_signed(sent, self._secret)

    def set_apart(self, request: Request, namespace: str | None, block_size: int) -> None:
        """Have a request share vLLM's blocks with its own namespace only.

        Call it before vLLM looks the request up. Requests of the server's own namespace share
        blocks as without tenants.
        """
        if self.are_told_apart and namespace != self.own:
            set_apart(request, 0, block_size, block_mark(namespace or "", self._secret))
