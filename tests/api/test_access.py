"""Keys and limits are those of a vLLM server, by the same variables."""

from __future__ import annotations

import json

import pytest

from cacheblend_rag.api.app import create_app
from tests.api.conftest import http_client

pytestmark = pytest.mark.asyncio
ASKED = {"messages": [{"role": "user", "content": "w3"}]}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/cacheblend/release")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def test_every_path_but_health_needs_the_key(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    http = http_client(create_app(engine))
    for headers in ({}, bearer("other"), {"authorization": "sesame"}):
        for path in PATHS:
            answer = await http.post(path, json=ASKED, headers=headers)
            assert answer.status_code == 401, path
            told = {**answer.json()["error"], "message": "told"}
            kind = "authentication_error"
            assert told == {"message": "told", "type": kind, "param": None, "code": None}
        for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json"):
            assert (await http.get(path, headers=headers)).status_code == 401, path
    assert (await http.get("/health")).status_code == 200
    answer = await http.post("/v1/chat/completions", json=ASKED, headers=bearer("sesame"))
    assert answer.status_code == 200


async def test_a_key_may_be_given_to_the_application(engine):
    http = http_client(create_app(engine, api_key="sesame"))
    assert (await http.get("/v1/models")).status_code == 401
    assert (await http.get("/v1/models", headers=bearer("sesame"))).status_code == 200


async def test_releasing_needs_the_store_key(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("CACHEBLEND_STORE_KEY", "open")
    http = http_client(create_app(engine))
    engine.precompute(["w3 w4"], progress=False)
    path = "/cacheblend/release"
    assert (await http.post(path, headers=bearer("sesame"))).status_code == 403
    answer = await http.post(path, headers=bearer("open"))
    assert (answer.status_code, answer.json()) == (200, {"released_bytes": 16})


async def test_long_and_deep_bodies_are_refused(engine, monkeypatch):
    monkeypatch.setenv("CACHEBLEND_MAX_BODY_MIB", "1")
    http = http_client(create_app(engine))
    long = {"messages": [{"role": "user", "content": "w" * (1 << 20)}]}
    assert (await http.post("/v1/chat/completions", json=long)).status_code == 413
    deep = json.dumps(ASKED)[:-1] + ', "x": ' + "[" * 100 + "]" * 100 + "}"
    answer = await http.post(
        "/v1/chat/completions", content=deep, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, "nested deeper" in answer.text) == (400, True)
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_documents_are_stored_under_the_store_key_and_reused(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("CACHEBLEND_STORE_KEY", "open")
    http = http_client(create_app(engine))
    path, text = "/v1/cacheblend/documents/notes/a.md", " ".join(["w5"] * 300)
    body = {"chunks": [text]}
    assert (await http.put(path, json=body)).status_code == 401
    assert (await http.put(path, json=body, headers=bearer("sesame"))).status_code == 403
    stored = await http.put(path, json=body, headers=bearer("open"))
    assert (stored.status_code, stored.json()["computed"]) == (200, 1)
    asked = {"messages": [{"role": "user", "content": f"w3 {text} w4"}]}
    answer = await http.post("/v1/chat/completions", json=asked, headers=bearer("sesame"))
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert (await http.delete(path, headers=bearer("open"))).status_code == 200
    answer = await http.post("/v1/chat/completions", json=asked, headers=bearer("sesame"))
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_server_of_a_collection_takes_no_documents(engine):
    http = http_client(create_app(engine, documents=False))
    answer = await http.put("/v1/cacheblend/documents/a", json={"chunks": ["w3"]})
    assert answer.status_code in {404, 501}
