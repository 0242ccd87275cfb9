"""Requests wait up to a bound; the work of clients that have gone stops."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from cacheblend_rag.api.app import create_app
from tests.api.conftest import http_client

pytestmark = pytest.mark.asyncio
ASKED = {"messages": [{"role": "user", "content": "w3"}]}
PATH = "/v1/chat/completions"
ROUTES = [(PATH, ASKED), ("/v1/completions", {"prompt": "w3"}), ("/v1/responses", {"input": "w3"})]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_too_many_waiting_requests_are_told_to_come_again(engine, script):
    script.may_go_on = threading.Event()
    http = http_client(create_app(engine, running=1, waiting=2))
    inside = [asyncio.create_task(http.post(PATH, json=ASKED)) for _ in range(3)]
    await until(lambda: script.sampled)
    await asyncio.sleep(0.05)
    refused = await http.post(PATH, json=ASKED)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "overloaded"
    assert len(script.sampled) == 1, "the others wait for their turn"
    script.may_go_on.set()
    assert [answer.status_code for answer in await asyncio.gather(*inside)] == [200] * 3
    assert (await http.post(PATH, json=ASKED)).status_code == 200


@pytest.mark.parametrize(("path", "asked"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_its_work(app, script, path, asked, stream):
    script.may_go_on = threading.Event()
    body = json.dumps({**asked, "stream": stream}).encode()
    arrived = asyncio.Queue()
    arrived.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent = []

    async def send(event):
        sent.append(event)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"server")],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
    }
    serving = asyncio.create_task(app(scope, arrived.get, send))
    await until(lambda: script.sampled and (sent or not stream))
    assert not script.cancelled.is_set()
    arrived.put_nowait({"type": "http.disconnect"})
    await until(script.cancelled.is_set)
    async with asyncio.timeout(20):
        await serving
    script.may_go_on.set()
    assert (await http_client(app).post(path, json=asked)).status_code == 200


async def test_an_answer_that_fails_stops_the_others_of_its_request(app, script):
    script.may_go_on, script.error = threading.Event(), RuntimeError("no")
    http = http_client(app)
    asking = asyncio.create_task(http.post(PATH, json={**ASKED, "n": 4}))
    await until(lambda: len(script.sampled) == 4)
    script.may_go_on.set()
    assert (await asking).status_code == 500
    serving = app.state.serving
    assert serving.gate._inside == 0
    assert not serving.gate.turn.locked()


async def test_one_line_is_logged_for_each_request(http, caplog, engine):
    caplog.set_level("INFO", "cacheblend_rag.api")
    await http.post(PATH, json={"messages": [{"role": "user", "content": "w123"}]})
    await http.post(PATH, json={**ASKED, "stream": True})
    await http.post(PATH, json={**ASKED, "model": "gpt"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith(f"POST {PATH}: 3 prompt tokens, 0 reused, 0 recomputed (no_chunk);")
    assert "404" in lines[2]
    assert "w123" not in " ".join(lines), "no text of a prompt"
