"""Keys and limits of the server: those of a vLLM server, read from the same variables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cacheblend_rag.api.errors import TOLD, of_engine
from cacheblend_rag.engines.vllm.middleware.access import AccessMiddleware
from cacheblend_rag.engines.vllm.middleware.bodies import LARGE_BYTES


class BodyRoute(APIRoute):
    """Reads large bodies off the event loop, and answers whatever fails unexpectedly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(_BodyRequest(request.scope, request.receive))
            except (HTTPException, *TOLD):  # the application answers them
                raise
            except Exception as error:
                return of_engine(error, None).response()

        return answer


class _BodyRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LARGE_BYTES:
            return await super().json()
        return await asyncio.to_thread(json.loads, body)


def guard(app: FastAPI, api_key: str | None) -> None:
    """Let an application ask for keys, and refuse bodies that are long, deep, or of many values.

    api_key: what clients must send; by default the environment's VLLM_API_KEY.
    """
    app.router.route_class = BodyRoute
    app.state.args = SimpleNamespace(api_key=[api_key] if api_key else None)
    anything: Any = ["*"]  # as by vLLM: who may ask is checked before
    app.add_middleware(
        CORSMiddleware, allow_origins=anything, allow_methods=anything, allow_headers=anything
    )
    app.add_middleware(AccessMiddleware)
