"""Errors: their status, one line that names the field, the form that clients read."""

from __future__ import annotations

import re

import openai
import pytest

from cacheblend_rag.errors import (
    ConfigError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
    OutOfMemoryError,
    StoreError,
)
from tests.api.conftest import http_client

pytestmark = pytest.mark.asyncio
MESSAGES = [{"role": "user", "content": "w3"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FORM = {"response_format": {"type": "json_object"}}
BAD = [
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "robot", "content": "w3"}]}, "messages.0.role", "'user'"),
    (CHAT, {"messages": [{"role": "user", "content": ["a", 5]}]}, "messages.0.content.1", "valid"),
    (CHAT, {"stop": ["w"] * 17}, "stop", "at most 16"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "g"),
    (CHAT, {"structured_outputs": {"yaml": 1}}, "structured_outputs", "give one of json"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
    (CHAT, {"structured_outputs": {"regex": "a"}, **FORM}, "structured_outputs", "exclude each"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {"tools": []}, "tools", "leave it out"),  # as by vLLM
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
    (CHAT, {"guided_json": {}, "guided_regex": "a"}, "guided_regex", "structured_outputs"),
    (CHAT, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "/v1/cacheblend/documents"),
    (CHAT, {"echo": True}, "echo", "/v1/completions"),
    (COMPLETIONS, {"prompt": []}, "prompt", "is empty"),
    (COMPLETIONS, {"prompt": [256]}, "prompt", "outside 0 to 255"),
    (COMPLETIONS, {"prompt": [[3], [4, "a"]]}, "prompt.1.1", "should be a valid integer"),
    (COMPLETIONS, {"prompt": ["w3"] * 9, "n": 8}, "prompt", "more than 64 answers"),
    (COMPLETIONS, {"logprobs": 1, "echo": True, "stream": True}, "stream", "set it to false"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "or 0 with echo"),
    (COMPLETIONS, {"best_of": 3}, "best_of", "use n"),
]


@pytest.mark.parametrize(("path", "more", "param", "said"), BAD, ids=str)
async def test_a_bad_field_is_named_with_the_fix(http, path, more, param, said):
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "w3"}
    answer = await http.post(path, json={**asked, **more})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_clients_raise_their_own_errors(client):
    with pytest.raises(openai.NotFoundError) as told:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert told.value.code == "model_not_found"
    assert "this server has 'model'" in str(told.value)
    long = [{"role": "user", "content": "w3 " * 40000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as told:
            await client.chat.completions.create(model="model", messages=long, stream=stream)
        assert told.value.code == "context_length_exceeded"
        said = r"This model's maximum context length is 32768 tokens\. However, .* 40\d+ tokens"
        assert re.search(rf"{said}.*: retrieve fewer chunks or shorten", str(told.value))
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")
    assert [model.id async for model in await client.models.list()] == ["model"]
    assert (await client.models.retrieve("model")).id == "model"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OutOfMemoryError("no memory on cpu"), 503, "no memory on cpu"),
        (EngineUnavailableError("gone"), 503, "gone"),
        (MissingExtraError("response_format", "structured"), 400, "pip install"),
        (StoreError("the disk is full"), 409, "the disk is full"),
        (ModelLoadError("no such model"), 500, "no such model"),
        (ConfigError("tools or response_format is refused: a"), 400, "tools or response_format"),
        (RuntimeError("secret detail"), 500, "its log says why"),
    ],
    ids=repr,
)
async def test_errors_of_the_engine_have_a_status(http, script, error, status, said):
    script.pieces, script.error = (), error
    for stream in (False, True):
        asked = {"messages": MESSAGES, "stream": stream}
        answer = await http.post(CHAT, json=asked)
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]
        assert "secret" not in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)


async def test_facts(http, engine):
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/version")).json()["engine"] == "toy"
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("model", engine.context_window)
    await http.post(CHAT, json={"messages": MESSAGES})
    assert re.search(r"^cacheblend_requests_total 1", (await http.get("/metrics")).text, re.M)
    assert "/v1/chat/completions" in (await http.get("/openapi.json")).json()["paths"]
    engine.close()
    assert (await http.get("/health")).status_code == 503


async def test_whatever_fails_in_a_route_has_the_apis_form(app, engine, monkeypatch):
    def fail(*_):
        raise OSError("a secret of the server")

    monkeypatch.setattr(type(engine), "is_open", property(fail))
    answer = await http_client(app).get("/health")
    assert answer.status_code == 500
    told = answer.json()["error"]
    assert told["message"] == "the server failed; its log says why"
    assert told["type"] == "server_error"
