"""The endpoint plugin of vLLM's server: one engine a namespace. No vLLM is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from fastapi import FastAPI

from cacheblend_rag.api import vllm_plugin
from cacheblend_rag.api.vllm_plugin import DocumentsPlugin
from cacheblend_rag.engines.vllm.middleware.access import GRANT
from cacheblend_rag.engines.vllm.middleware.keys import Grant
from cacheblend_rag.engines.vllm.namespaces import TENANTS_VARIABLE
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.kv.chunk_kv import namespace_id
from tests.engines.contract import CONFIG
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer

DOCUMENTS = "/v1/cacheblend/documents"
ACME, GLOBEX = Grant("acme", may_change=True), Grant("globex", may_change=True)
Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]


class FakeVLLMEngine(ToyEngine):
    """A toy engine, made of what one over vLLM is made of."""

    made: list[FakeVLLMEngine]
    fails = False

    def __init__(self, transport: Any, *, tokenizer: Any, **settings: Any) -> None:
        if FakeVLLMEngine.fails:
            raise EngineUnavailableError("vLLM does not answer")
        super().__init__(tokenizer or make_tokenizer(), config=CONFIG, **settings)
        self.transport = transport
        FakeVLLMEngine.made.append(self)


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeVLLMEngine.made, FakeVLLMEngine.fails = [], False
    monkeypatch.setattr(vllm_plugin, "VLLMEngine", FakeVLLMEngine)
    monkeypatch.delenv(TENANTS_VARIABLE, raising=False)
    yield
    for engine in FakeVLLMEngine.made:
        engine.close()


@asynccontextmanager
async def vllms_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """As vLLM's own: it removes the application's state at the end."""
    yield
    del app.state


def answers(ask: Ask, settings: dict[str, Any], grant: Grant | None = ACME) -> Any:
    """What requests get from a server with the plugin; grant: what the middleware lets in."""

    async def run() -> Any:
        app, plugin = FastAPI(lifespan=vllms_lifespan), DocumentsPlugin()
        plugin.attach_router(app)
        client = SimpleNamespace(
            vllm_config=SimpleNamespace(
                kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings)
            ),
            model_config=SimpleNamespace(max_model_len=4096),
            engine_core=SimpleNamespace(add_request_async=print),
        )
        await plugin.init_state(client, app.state, SimpleNamespace(model="toy"))

        async def middleware(scope: Any, receive: Any, send: Any) -> None:
            named = dict(scope["headers"]).get(b"x-test", b"").decode()
            granted = Grant(named, may_change=True) if named else grant
            await app({**scope, **({GRANT: granted} if granted else {})}, receive, send)

        transport = httpx.ASGITransport(middleware)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            return await ask(http)

    return asyncio.run(run())


def put(name: str = "a", **headers: str) -> Ask:
    async def ask(http: httpx.AsyncClient) -> Any:
        chunks = {"chunks": ["w1 w2 w3", "w4 w5 w6"]}
        return await http.put(f"{DOCUMENTS}/{name}", json=chunks, headers=headers)

    return ask


def test_a_namespace_has_one_engine_and_a_registry_beside_its_kv(tmp_path: Path) -> None:
    async def ask(http: httpx.AsyncClient) -> list[Any]:
        names = ["acme", "acme", "globex"]
        await asyncio.gather(*(put(**{"x-test": name})(http) for name in names))
        listed = [await http.get(DOCUMENTS, headers={"x-test": name}) for name in ("acme", "new")]
        return [one.json()["data"] for one in listed]

    settings = {"kv_path": str(tmp_path), "tenants": True}
    acme, new = answers(ask, settings)
    assert [one["id"] for one in acme] == ["a"]
    assert new == []
    made = FakeVLLMEngine.made
    assert sorted(engine.namespace for engine in made) == ["acme", "globex", "new"]
    assert all(engine.transport._namespace == engine.namespace for engine in made)
    files = {path.name for path in tmp_path.glob("*.sqlite")}
    assert {f"chunks-{namespace_id(name)}.sqlite" for name in ("acme", "globex")} <= files


@pytest.mark.parametrize(
    ("settings", "key", "is_used"),
    [({}, "", True), ({}, "k", False), ({"unconfirmed_context": True}, "k", True)],
)
def test_who_stores_is_not_trusted_where_others_ask(
    settings: dict[str, Any], key: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_STORE_KEY", key)
    assert answers(put(), settings, GLOBEX).status_code == 200
    (engine,) = FakeVLLMEngine.made
    assert engine.lead_in.unconfirmed_context == is_used


def test_without_the_middleware_nobody_is_answered() -> None:
    answer = answers(put(), {}, None)
    assert answer.status_code == 503
    assert "need the access middleware" in answer.json()["error"]["message"]
    assert FakeVLLMEngine.made == []


def test_an_engine_that_does_not_open_is_opened_again() -> None:
    async def ask(http: httpx.AsyncClient) -> tuple[int, int]:
        FakeVLLMEngine.fails = True
        first = await put()(http)
        FakeVLLMEngine.fails = False
        return first.status_code, (await put()(http)).status_code

    assert answers(ask, {}) == (503, 200)


def test_engines_close_with_the_server() -> None:
    opened: list[bool] = []

    async def ask(http: httpx.AsyncClient) -> Any:
        await asyncio.gather(*(put(**{"x-test": name})(http) for name in ("acme", "globex")))
        opened.extend(engine.is_open for engine in FakeVLLMEngine.made)

    answers(ask, {"tenants": True})
    assert opened == [True, True]
    assert [engine.is_open for engine in FakeVLLMEngine.made] == [False, False]
