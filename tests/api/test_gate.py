"""Requests wait up to a bound; the work of clients that have gone stops."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from cacheblend_rag.api.app import create_app
from cacheblend_rag.api.gate import LEFT, PREPARING
from tests.api.conftest import Caller, http_client
from tests.api.scripted import ScriptedEngine

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


async def test_a_request_for_many_answers_leaves_room_for_others(engine, script):
    script.may_go_on = threading.Event()
    http = http_client(create_app(engine, running=LEFT + 2))
    many = asyncio.create_task(http.post(PATH, json={**ASKED, "n": 64}))
    await until(lambda: len(script.sampled) == 2)
    other = asyncio.create_task(http.post(PATH, json={**ASKED, "temperature": 0.5}))
    await until(lambda: script.sampled[-1].temperature == 0.5)
    script.may_go_on.set()
    assert [(await one).status_code for one in (many, other)] == [200, 200]
    assert len(script.sampled) == 65


@pytest.mark.parametrize(("path", "asked"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_its_work(app, script, path, asked, stream):
    script.may_go_on = threading.Event()
    caller = Caller(app, path, json.dumps({**asked, "stream": stream}).encode())
    await until(lambda: script.sampled and (caller.sent or not stream))
    assert not script.cancelled.is_set()
    await caller.hang_up()
    await until(script.cancelled.is_set)
    script.may_go_on.set()
    assert (await http_client(app).post(path, json=asked)).status_code == 200


async def test_an_answer_that_fails_stops_the_others_of_its_request(app, script):
    script.may_go_on, script.error = threading.Event(), RuntimeError("no")
    http = http_client(app)
    asking = asyncio.create_task(http.post(PATH, json={**ASKED, "n": 4}))
    await until(lambda: len(script.sampled) == 4)
    script.may_go_on.set()
    assert (await asking).status_code == 500
    assert not app.state.serving.gate.turn.locked()


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


class SlowTokenizer:
    """Counts what it is asked to encode, and takes its time if it is told to."""

    def __init__(self, inner):
        self.inner, self.characters, self.may_go_on = inner, 0, None
        self.running = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def encode(self, text, **options):
        self.characters += len(text)
        self.running += 1
        if self.may_go_on is not None:
            self.may_go_on.wait(20)
        self.running -= 1
        return self.inner.encode(text, **options)


@pytest.fixture
def slow(engine):
    found = SlowTokenizer(engine.tokenizer)
    made = ScriptedEngine(found)
    yield made, found
    made.close()


@pytest.mark.parametrize(("path", "asked"), ROUTES)
async def test_a_prompt_that_is_by_far_too_long_is_refused_before_it_is_tokenized(
    slow, path, asked
):
    engine, tokenizer = slow
    http = http_client(create_app(engine))
    tokenizer.characters = 0
    text = "w3 " * 1_000_000
    fields = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
    answer = await http.post(path, json={name: fields[name] for name in asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"prompt holds more than {engine.context_window} tokens" in error["message"]
    assert tokenizer.characters < len(text) / 10


async def test_a_long_text_of_few_tokens_is_no_long_prompt(slow, script):
    """As of one unknown word, or of white space that a tokenizer leaves out."""
    engine, _ = slow
    text = "w3" + " " * 400_000 + "w4"
    answer = await http_client(create_app(engine)).post("/v1/completions", json={"prompt": text})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 2


async def test_prompts_of_clients_that_have_gone_keep_their_places_and_no_more_begin(slow):
    engine, tokenizer = slow
    app = create_app(engine)
    tokenizer.may_go_on = threading.Event()
    http = http_client(app)
    gone = [asyncio.create_task(http.post(PATH, json=ASKED)) for _ in range(20)]
    await until(lambda: tokenizer.running)
    await asyncio.sleep(0.1)
    for task in gone:
        task.cancel()
    await asyncio.sleep(0.1)
    assert tokenizer.running <= PREPARING
    before = tokenizer.characters
    tokenizer.may_go_on.set()
    assert (await http.post(PATH, json=ASKED)).status_code == 200
    await asyncio.gather(*gone, return_exceptions=True)
    assert tokenizer.characters - before < 20 * len("w3")
