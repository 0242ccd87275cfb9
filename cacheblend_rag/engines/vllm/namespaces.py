"""Carries a request's namespace, and its job if it has one, from a server to the connector.

The access middleware knows the namespace by the client's key, in the process of the HTTP server.
The connector needs it in vLLM's engine core, another process. So the middleware notes it in a
context variable, as an engine does with a job, and whatever is sent to the engine core gets it as
one of its ``trace_headers``. vLLM puts only ``traceparent`` and ``tracestate`` of a client's
headers there, and nothing of a body, so a client can name no namespace, and send no job. A request
that came another way has no namespace, and reuses nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
from contextvars import ContextVar
from typing import Any

from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.reason import Reason, ReasonCode

TENANTS_VARIABLE = "CACHEBLEND_TENANTS"
"""The environment variable with the path of a tenants' file."""
FIELD = "cacheblend-namespace"
"""The trace header that holds a request's namespace."""
JOB_FIELD = "cacheblend-job"
"""The trace header that holds a request's job, as JSON."""

NO_NAMESPACE = Reason(
    ReasonCode.UNSUPPORTED_REQUEST,
    "the request came past the server's access middleware, so it belongs to no namespace",
)
NOT_FOR_TENANTS = Reason(
    ReasonCode.UNSUPPORTED_REQUEST,
    "release frees the memory of all tenants: use the server's own store key",
)

current: ContextVar[str | None] = ContextVar("cacheblend_namespace", default=None)
"""The namespace of the HTTP request that is being answered; None if keys do not decide it."""
current_job: ContextVar[str | None] = ContextVar("cacheblend_job", default=None)
"""The job of the request that is being sent, None without one."""


def are_told_apart(*, tenants: bool) -> bool:
    """Whether keys decide namespaces: by the connector's setting, or since there is a file."""
    return tenants or bool(os.environ.get(TENANTS_VARIABLE))


def namespace_of(request: Any) -> str | None:
    """Return the namespace of vLLM's Request; None if the middleware gave it none."""
    return (request.trace_headers or {}).get(FIELD)


def job_of(request: Any) -> str | None:
    """Return the job of vLLM's Request, None without one."""
    return (request.trace_headers or {}).get(JOB_FIELD)


def block_mark(namespace: str | None) -> str:
    """Return the part of a ``cache_salt`` that keeps a namespace's blocks to itself.

    It ends the salt of each request, and all are of one length: no salt of a client's own, which
    stands before it, makes a request look like another namespace's.
    """
    return hashlib.sha256((namespace or "").encode()).hexdigest()


def carry(client: Any) -> None:
    """Have vLLM's engine client send the current namespace and job with each request, from now on.

    It may be called again. Raises EngineUnavailableError when the client has no such way.
    """
    core: Any = getattr(client, "engine_core", None)
    send = getattr(core, "add_request_async", None)
    if send is None:
        raise EngineUnavailableError(
            "this vLLM's engine client has no engine_core.add_request_async, so that requests "
            "cannot be told apart by tenant, and chunks not stored: use a vLLM that cacheblend-rag "
            "was tested with"
        )
    if getattr(send, "carries", False):
        return

    @functools.wraps(send)
    async def add_request_async(request: Any) -> Any:
        carried = {FIELD: current.get(), JOB_FIELD: current_job.get()}
        if told := {name: value for name, value in carried.items() if value is not None}:
            request.trace_headers = {**(request.trace_headers or {}), **told}
        return await send(request)

    vars(add_request_async)["carries"] = True
    core.add_request_async = add_request_async
