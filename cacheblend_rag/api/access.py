"""Keys and limits of the server: those of a vLLM server, read from the same variables."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fastapi import FastAPI

from cacheblend_rag.engines.vllm.middleware.access import AccessMiddleware

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.middleware.release import Scope


class ServerAccess(AccessMiddleware):
    """The access middleware of a vLLM server, in front of an engine in this process."""

    async def _freed(self, scope: Scope) -> int:
        return await asyncio.to_thread(scope["app"].state.serving.engine.release)


def guard(app: FastAPI, api_key: str | None) -> None:
    """Let an application ask for keys and refuse long and deep bodies.

    api_key: what clients must send; by default the environment's VLLM_API_KEY.
    """
    app.state.args = SimpleNamespace(api_key=[api_key] if api_key else None)
    app.add_middleware(ServerAccess)
