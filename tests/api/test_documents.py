"""Documents over HTTP, over the toy engine: what each route does, and refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cacheblend_rag import TransformersEngine
from cacheblend_rag.api import gate
from cacheblend_rag.api.documents import documents_router, store_router
from cacheblend_rag.api.gate import EngineLending
from cacheblend_rag.engines.vllm.middleware.keys import STORERS_STATE
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.kv import TieredKVStore
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.report import Evicted
from cacheblend_rag.settings.tier_url import TierUrl
from tests.engines.contract import CONFIG
from tests.engines.toy_engine import ToyEngine
from tests.kv.samples import until
from tests.local_servers import redis_server, redis_url
from tests.models import make_model, make_tokenizer

DOCUMENTS = "/v1/cacheblend/documents"
ONE, TWO, THREE = "w1 w2 w3 w4 w5", "w6 w7 w8 w9", "w10 w11 w12 w13"


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    engine = ToyEngine(make_tokenizer(), config=CONFIG)
    yield engine
    engine.close()


def serving(engine: ToyEngine) -> FastAPI:
    app = FastAPI()
    setattr(app.state, STORERS_STATE, EngineLending(lambda _: engine))
    app.include_router(store_router)
    app.include_router(documents_router)
    return app


@pytest.fixture
def client(engine: ToyEngine) -> Iterator[TestClient]:
    with TestClient(serving(engine)) as client:  # one event loop for all requests
        yield client


def refused(answer: Any, status: int = 400) -> str:
    """What an error says, after a look at its form."""
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    message = str(told["error"]["message"])
    assert message
    assert "\n" not in message
    return f"{told['error']['param']}: {message}"


# What the routes do


def test_a_document_is_stored_shown_replaced_and_deleted(
    client: TestClient, engine: ToyEngine
) -> None:
    told = client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE, TWO]}).json()
    assert told.pop("seconds") >= 0
    named = {"object": "document", "id": "a", "collection": "", "message": None}
    counted = {"chunks": 2, "computed": 2, "computed_tokens": 9, "skipped": 0, "replaced": 0}
    assert told == {**named, **counted, "refused": {}, "failed": 0, "pending": []}
    again = client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE, TWO]}).json()
    assert (again["computed"], again["skipped"]) == (0, 2)
    asked = engine.generate(f"{ONE}\n\n{TWO} w20").report
    assert [chunk.hit for chunk in asked.chunks] == [True, True]
    changed = client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE, THREE]}).json()
    assert (changed["computed"], changed["skipped"], changed["replaced"]) == (1, 1, 1)
    shown = client.get(f"{DOCUMENTS}/a").json()
    assert [(one["text"], one["stored"]) for one in shown["chunks"]] == [(ONE, True), (THREE, True)]
    engine.release()
    assert [one["stored"] for one in client.get(f"{DOCUMENTS}/a").json()["chunks"]] == [False] * 2
    client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE, THREE]})
    gone = {"object": "document.deleted", "id": "a", "deleted": True, "evicted": 2}
    assert client.delete(f"{DOCUMENTS}/a").json() == {**gone, "pending": [], "message": None}
    assert engine.stored_chunks() == 0
    for asked in (client.get, client.delete):
        assert "there is no document 'a'" in refused(asked(f"{DOCUMENTS}/a"), 404)


def test_what_a_tier_could_not_delete_is_not_called_deleted() -> None:
    class Away(ToyEngine):
        def _evict(self, keys: Sequence[KVKey]) -> Evicted:
            return super()._evict(keys) + Evicted(0, ["redis"] if keys else [])

    engine = Away(make_tokenizer(), config=CONFIG)
    with TestClient(serving(engine)) as client:
        client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE, TWO]})
        changed = client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE]}).json()
        assert (changed["replaced"], changed["pending"]) == (1, ["redis"])
        deleted = client.delete(f"{DOCUMENTS}/a").json()
    assert (deleted["deleted"], deleted["evicted"], deleted["pending"]) == (False, 1, ["redis"])
    for told in (changed, deleted):
        assert "no answer from redis" in told["message"]
    engine.close()


def test_a_text_is_split_and_its_chunks_are_shown_as_prompts_must_hold_them(
    client: TestClient, engine: ToyEngine
) -> None:
    paragraphs = [" ".join(f"w{i * 20 + j}" for j in range(20)) for i in range(10)]
    text = "\n\n".join(paragraphs)
    told = client.put(f"{DOCUMENTS}/long", json={"text": text, "chunk_tokens": 45}).json()
    chunks = [one["text"] for one in client.get(f"{DOCUMENTS}/long").json()["chunks"]]
    assert told["chunks"] == told["computed"] == len(chunks) > 3
    assert all(chunk in text and len(engine.tokenize(chunk)) <= 45 for chunk in chunks)
    assert "".join("".join(chunks).split()) == "".join(text.split()), "nothing is left out"


def test_separator_boundaries_and_collection_are_the_documents(
    client: TestClient, engine: ToyEngine
) -> None:
    body = {
        "chunks": [ONE, TWO, THREE],
        "separator": " w99 ",
        "boundaries": ["all", "all", "staff"],
        "collection": "fine",
    }
    assert client.put(f"{DOCUMENTS}/a", json=body).json()["collection"] == "fine"
    contexts = [tuple(chunk.context) for chunk in engine.registry.document("a", "fine")]
    assert contexts == [(), (ONE, " w99 "), ()]
    client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE]})
    assert len(client.get(f"{DOCUMENTS}/a").json()["chunks"]) == 4
    assert len(client.get(f"{DOCUMENTS}/a?collection=fine").json()["chunks"]) == 3
    assert "in collection 'none'" in refused(client.get(f"{DOCUMENTS}/a?collection=none"), 404)
    assert client.delete(f"{DOCUMENTS}/a?collection=fine").status_code == 200
    assert [one["collection"] for one in client.get(f"{DOCUMENTS}/a").json()["chunks"]] == [""]


def test_documents_are_listed_in_pages(client: TestClient) -> None:
    names = [f"{folder}/{name}" for folder in "ba" for name in ("x", "y", "z")]
    for index, name in enumerate(names):
        client.put(f"{DOCUMENTS}/{name}", json={"chunks": [f"w{index} {ONE}"]})
    client.put(f"{DOCUMENTS}/a/z", json={"chunks": [TWO], "collection": "fine"})
    seen: list[tuple[str, str]] = []
    after, more = "", True
    while more:
        page = client.get(DOCUMENTS, params={"limit": 2, "after": after}).json()
        assert 0 < len({one["id"] for one in page["data"]}) <= 2
        seen += [(one["id"], one["collection"]) for one in page["data"]]
        after, more = seen[-1][0], page["has_more"]
    assert seen == sorted([*((name, "") for name in names), ("a/z", "fine")])
    only = client.get(DOCUMENTS, params={"collection": "fine"}).json()
    assert [(one["id"], one["chunks"]) for one in only["data"]] == [("a/z", 1)]
    none = client.get(DOCUMENTS, params={"after": "z"}).json()
    assert none == {"object": "list", "data": [], "has_more": False}


# What they refuse


def test_an_engine_that_fails_is_an_error_of_one_line(
    client: TestClient, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EngineUnavailableError("vLLM has ended\nsee its log")

    monkeypatch.setattr(engine, "precompute", fail)
    answer = client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE]})
    assert refused(answer, 503) == "None: vLLM has ended"
    monkeypatch.undo()
    monkeypatch.setattr(ToyEngine, "read_only", property(lambda _: True))
    assert "read only" in refused(client.put(f"{DOCUMENTS}/b", json={"chunks": [ONE]}), 409)
    assert client.get("/v1/cacheblend/stats").json()["read_only"] is True


def test_while_a_tier_is_away_nothing_is_said_that_is_not_so() -> None:
    with redis_server() as server:
        tier = open_tier(TierUrl(redis_url(server, "timeout=0.5s")), "cpu")
        store, tokenizer = TieredKVStore([tier]), make_tokenizer()
        engine = TransformersEngine(make_model(), tokenizer=tokenizer, store=store)
        with TestClient(serving(engine)) as client:
            client.put(f"{DOCUMENTS}/a", json={"chunks": [ONE, TWO]})
            shown = client.get(f"{DOCUMENTS}/a").json()["chunks"]
            assert [one["stored"] for one in shown] == [True, True]
            server.pause()
            shown = client.get(f"{DOCUMENTS}/a").json()["chunks"]
            assert [one["stored"] for one in shown] == [None, None]
            assert client.get("/v1/cacheblend/stats").json()["stored_chunks"] is None
            told = client.delete(f"{DOCUMENTS}/a").json()
            assert (told["deleted"], told["pending"]) == (False, ["redis"])
            server.resume()
            assert until(lambda: store.stats()["redis"]["entries"] == 0, 15), "it is deleted later"
            assert client.get("/v1/cacheblend/stats").json()["stored_chunks"] == 0
        engine.close()


# Many at once


class Gated(ToyEngine):
    """Stores nothing before it may."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer(), config=CONFIG)
        self.gate, self.begun = threading.Event(), threading.Semaphore(0)

    def precompute(self, *given: Any, **options: Any) -> Any:
        self.begun.release()
        assert self.gate.wait(60)
        return super().precompute(*given, **options)


def test_a_long_document_holds_nobody_up_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "MOST_LENT", 6)
    engine = Gated()

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(serving(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            puts = [
                asyncio.create_task(client.put(f"{DOCUMENTS}/{i}", json={"chunks": [f"w{i} w1"]}))
                for i in range(5)
            ]
            for _ in range(gate.CHANGES):
                assert await asyncio.to_thread(engine.begun.acquire, timeout=60)
            read = await client.get(DOCUMENTS)
            more = asyncio.create_task(client.put(f"{DOCUMENTS}/5", json={"chunks": ["w6 w1"]}))
            await asyncio.sleep(1.0)
            busy = await client.put(f"{DOCUMENTS}/6", json={"chunks": ["w7 w1"]})
            assert "try again later" in refused(busy, 503)
            assert int(busy.headers["retry-after"]) > 0
            engine.gate.set()
            done = await asyncio.gather(*puts, more)
            return [read.status_code, *(one.status_code for one in done)]

    assert asyncio.run(ask()) == [200] * 7
    assert len(engine.registry) == 6
    engine.close()


def test_versions_of_a_document_follow_one_another(client: TestClient, engine: ToyEngine) -> None:
    """Whichever comes last is the document; none is a mix of two."""
    versions = [[f"w{i} w{i + 1} w{i + 2}", f"w{i + 50} w1"] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for chunks in versions:
            pool.submit(client.put, f"{DOCUMENTS}/a", json={"chunks": chunks})
    assert [one["text"] for one in client.get(f"{DOCUMENTS}/a").json()["chunks"]] in versions
    assert engine.stored_chunks() == 2
