"""Handles POST /cacheblend/release, which frees the memory of a server's chunk KV.

The access middleware answers it by sending vLLM the same job as ``engine.release()``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from cacheblend_rag.errors import EngineUnavailableError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

RELEASE_PATH = "/cacheblend/release"
COMPLETIONS_PATH = "/v1/completions"
REPLICA_HEADER = b"x-data-parallel-rank"
_KEPT_HEADERS = (b"authorization", b"host")


async def release_memory(app: Application, scope: Scope) -> int:
    """Have every replica behind a server release its memory; returns the bytes they freed.

    Args:
        app: vLLM's own application.
        scope: of the original request; its key is passed on.

    Raises:
        EngineUnavailableError: when vLLM fails to do it.
    """
    # With torch, which is not for `--help`.
    from cacheblend_rag.engines.vllm.job_client import carrier, released_by, status_request
    from cacheblend_rag.engines.vllm.protocol import (
        BlendJob,
        Declined,
        Failed,
        Result,
        SentLeadIn,
        result_of,
        status_of,
    )
    from cacheblend_rag.engines.vllm.protocol.status import NO_CONNECTOR

    def outcome(params: Any) -> Result:
        result = result_of(params)
        if result is None:
            return Failed(NO_CONNECTOR)
        return Failed(result.reason) if isinstance(result, Declined) else result

    status = status_of(await _params(app, scope, status_request()))
    order = carrier(BlendJob("release", SentLeadIn("none", "", 0)))
    ranks = range(status.replicas) if status.replicas > 1 else (None,)
    return released_by([outcome(await _params(app, scope, order, rank)) for rank in ranks])


async def _params(app: Application, scope: Scope, order: Any, rank: int | None = None) -> Any:
    """Send vLLM a request with a job; returns the connector's answer."""
    body = {
        "prompt": list(order.token_ids),
        "max_tokens": order.sampling.max_tokens,
        "ignore_eos": True,
        "cache_salt": order.salt,
        "kv_transfer_params": order.job.to_params(),
    }
    status, answer = await _post(app, scope, json.dumps(body).encode(), rank)
    try:
        told = json.loads(answer)
    except ValueError:
        told = None
    if status != HTTPStatus.OK or not isinstance(told, dict):
        said = answer[:200].decode(errors="replace")
        raise EngineUnavailableError(f"vLLM answered with status {status}: {said}")
    return told.get("kv_transfer_params")


async def _post(app: Application, scope: Scope, body: bytes, rank: int | None) -> tuple[int, bytes]:
    """Send a request to the application itself; returns status and body.

    rank: the replica to ask, None if there is only one.
    """
    path = scope.get("root_path", "") + COMPLETIONS_PATH
    headers = [
        *((name, value) for name, value in scope["headers"] if name in _KEPT_HEADERS),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([] if rank is None else [(REPLICA_HEADER, str(rank).encode())]),
    ]
    asked = {
        **scope,
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "state": dict(scope.get("state", {})),
    }
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, list[bytes]()

    async def receive() -> Event:
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()  # the caller does not hang up
        raise AssertionError

    async def send(event: Event) -> None:
        nonlocal status
        status = event.get("status", status)
        parts.append(event.get("body", b""))

    await app(asked, receive, send)
    return status, b"".join(parts)
