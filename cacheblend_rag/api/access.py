"""Keys and limits of the server: those of a vLLM server, read from the same variables."""

from __future__ import annotations

import asyncio
import os
from ipaddress import ip_address
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fastapi import FastAPI

from cacheblend_rag.engines.vllm.middleware.access import KEY_VARIABLE, AccessMiddleware
from cacheblend_rag.errors import ConfigError

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


def check_exposure(host: str) -> None:
    """Raise ConfigError when others could reach the server, and no key is set."""
    if not is_loopback(host) and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"--host {host}: other machines can reach it: set {KEY_VARIABLE} to a key that clients "
            "must send, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
