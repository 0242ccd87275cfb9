"""Keys and limits are those of a vLLM server, by the same variables."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest
import uvicorn

from cacheblend_rag.api import run
from cacheblend_rag.api.app import create_app

pytestmark = pytest.mark.asyncio
ASKED = {"messages": [{"role": "user", "content": "w3"}]}


async def test_headers_without_an_end_are_given_up(engine, script, monkeypatch):
    """A half-sent request, an unused connection, one that is used, and an endless header."""
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    run.bound_headers()
    server = uvicorn.Server(uvicorn.Config(create_app(engine), log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serving = asyncio.create_task(server.serve([taken]))
        connections = [await asyncio.open_connection(*taken.getsockname()) for _ in range(5)]
        (half, _), (unused, _), (used, _), (endless, _), (late, _) = connections
        connections[0][1].write(b"GET /health HTTP/1.1\r\nA: b\r\n")
        script.may_go_on = threading.Event()
        asked = b'{"messages": [{"role": "user", "content": "w3"}]}'
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
        )
        connections[2][1].write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(asked), asked))
        connections[3][1].write(b"GET / HTTP/1.1\r\nA: " + b"b" * run.MOST_HEADER_BYTES)
        connections[4][1].write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await late.readline()).startswith(b"HTTP/1.1 200")
        connections[4][1].write(b"GET /health")
        async with asyncio.timeout(20):
            for closed in (half, unused, endless, late):
                await closed.read()
        script.may_go_on.set()
        assert (await used.readline()).startswith(b"HTTP/1.1 200"), "its headers were complete"
        body, head = await asyncio.open_connection(*taken.getsockname())
        head.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        await asyncio.sleep(0.1)
        server.should_exit = True
        async with asyncio.timeout(20):
            await body.read()  # a body without its end does not hold up the server's
            await serving


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "//v1/models", "///v1/models/"])
async def test_models_are_listed_however_a_client_joins_its_base_url(http, path):
    told = await http.get(httpx.URL("http://localhost").copy_with(raw_path=path.encode()))
    assert (told.status_code, told.json()["object"]) == (200, "list")
    asked = httpx.URL("http://localhost").copy_with(raw_path=b"//v1/chat/completions")
    assert (await http.post(asked, json=ASKED)).status_code == 200


async def test_head_is_answered_as_get_and_options_with_what_a_path_takes(http):
    for path in ("/health", "/v1/models", "/version", "/v1/cacheblend/documents"):
        head, told = await http.head(path), await http.get(path)
        assert head.status_code == 200
        assert head.headers["content-length"] == told.headers["content-length"]
    takes = {
        "/v1/models": "GET, OPTIONS",
        "/v1/chat/completions": "OPTIONS, POST",
        "/v1/cacheblend/documents/a": "DELETE, GET, OPTIONS, PUT",
    }
    for path, methods in takes.items():
        told = await http.options(path)
        assert (told.status_code, told.headers["allow"]) == (204, methods)
        told = await http.patch(path)
        assert (told.status_code, told.headers["allow"]) == (405, methods)
        assert f"takes {methods}, not PATCH" in told.json()["error"]["message"]
