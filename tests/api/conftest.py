from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cacheblend_rag.api.app import create_app
from tests.api.scripted import ScriptedEngine


@pytest.fixture
def engine(monkeypatch) -> Iterator[ScriptedEngine]:
    for name in ("VLLM_API_KEY", "CACHEBLEND_STORE_KEY", "CACHEBLEND_MAX_BODY_MIB"):
        monkeypatch.delenv(name, raising=False)
    engine = ScriptedEngine()
    yield engine
    engine.close()


@pytest.fixture
def script(engine):
    return engine.script


@pytest.fixture
def app(engine):
    return create_app(engine, name="model")


def http_client(app) -> httpx.AsyncClient:
    """A client that calls an application in this process."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost"
    )


@pytest.fixture
def http(app) -> httpx.AsyncClient:
    return http_client(app)


def openai_client(app) -> openai.AsyncOpenAI:
    """An unmodified OpenAI client of an application in this process."""
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="sesame",
        http_client=http_client(app),
        max_retries=0,
    )


@pytest.fixture
def client(app) -> openai.AsyncOpenAI:
    return openai_client(app)


class Caller:
    """A client that sends a request to an application, and hangs up. sent: what it got so far."""

    def __init__(self, app: Any, path: str, body: bytes, **headers: str) -> None:
        named = {"content-type": "application/json", "host": "localhost", **headers}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        }
        self.sent: list[Any] = []
        self._arrived = asyncio.Queue[Any]()
        self._arrived.put_nowait({"type": "http.request", "body": body})
        self._serving = asyncio.create_task(app(scope, self._arrived.get, self._note))

    async def hang_up(self) -> None:
        self._arrived.put_nowait({"type": "http.disconnect"})
        async with asyncio.timeout(20):
            await self._serving

    async def _note(self, event: Any) -> None:
        self.sent.append(event)
