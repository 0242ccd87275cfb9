from __future__ import annotations

from collections.abc import Iterator

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
