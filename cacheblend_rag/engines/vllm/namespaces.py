"""Carries a request's namespace from a server's access middleware to the connector.

The middleware knows the namespace by the client's key, in the process of the HTTP server. The
connector needs it in vLLM's engine core, another process. So the middleware notes it in a context
variable, and the engine client that all of vLLM's routes use (``app.state.engine_client``) adds it
to each request's sampling parameters, signed with a secret that only these processes have. Clients
can name a namespace there, too (``vllm_xargs``), but cannot sign it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
from contextvars import ContextVar
from typing import Any

from cacheblend_rag.errors import EngineUnavailableError

SECRET_VARIABLE = "CACHEBLEND_NAMESPACE_SECRET"  # noqa: S105 - a name
FIELD = "cacheblend_namespace"
"""The field of a request's ``extra_args`` that holds its signed namespace."""
MAC_DIGITS = 64

current: ContextVar[str | None] = ContextVar("cacheblend_namespace", default=None)
"""The namespace of the HTTP request that is being answered; None if keys do not decide it."""


def new_secret() -> str:
    """Return a secret for SECRET_VARIABLE."""
    return secrets.token_hex(32)


def known_secret() -> str:
    """Return the secret that this process was started with, "" without one."""
    return os.environ.get(SECRET_VARIABLE, "")


def are_told_apart(*, tenants: bool) -> bool:
    """Whether keys decide namespaces: by the connector's setting, or since there is a secret."""
    return tenants or bool(known_secret())


def signed(namespace: str, secret: str) -> str:
    """Return a namespace with its message authentication code."""
    return _mac("namespace", namespace, secret) + namespace


def read_signed(sent: object, secret: str) -> str | None:
    """Return the namespace that was signed with ``secret``; None for anything else."""
    if not secret or not isinstance(sent, str):
        return None
    mac, namespace = sent[:MAC_DIGITS], sent[MAC_DIGITS:]
    try:
        is_right = hmac.compare_digest(mac.encode(), _mac("namespace", namespace, secret).encode())
    except UnicodeEncodeError:  # half of a character
        return None
    return namespace if is_right else None


def block_mark(namespace: str, secret: str) -> str:
    """Return what sets a namespace's blocks apart in vLLM's prefix cache; nobody can guess it."""
    return _mac("blocks", namespace, secret)[: MAC_DIGITS // 2]


def carry_namespaces(client: Any) -> None:
    """Have vLLM's engine client add the current namespace to each request, from now on.

    It may be called again. Raises EngineUnavailableError when the client takes no requests.
    """
    add_request = getattr(client, "add_request", None)
    if add_request is None:
        raise EngineUnavailableError(
            "this vLLM's engine client has no add_request, so that requests cannot be told apart "
            "by tenant: serve without --tenants, or with a vLLM that cacheblend-rag was tested with"
        )
    if getattr(add_request, "carries_namespaces", False):
        return

    @functools.wraps(add_request)
    async def add(request_id: str, prompt: Any, params: Any, *others: Any, **named: Any) -> Any:
        if (namespace := current.get()) is not None:
            params = with_namespace(params, namespace)
        return await add_request(request_id, prompt, params, *others, **named)

    vars(add)["carries_namespaces"] = True
    client.add_request = add


def with_namespace(params: Any, namespace: str) -> Any:
    """Return a copy of vLLM's SamplingParams with a signed namespace.

    Parameters of other kinds (of embeddings, say) are returned as they are: without a namespace.
    """
    if not hasattr(params, "extra_args"):
        return params
    params = params.clone()
    told = signed(namespace, known_secret())
    params.extra_args = {**(params.extra_args or {}), FIELD: told}
    return params


def _mac(purpose: str, namespace: str, secret: str) -> str:
    text = f"{purpose} {namespace}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
