"""Whatever a client sends, the server answers with an error of the client's, or an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.api import chat, completions, responses
from cacheblend_rag.api.app import create_app
from tests.api.conftest import http_client
from tests.api.scripted import ScriptedEngine

EXAMPLES = 150
BODIES = {
    "/v1/chat/completions": (
        chat.ChatRequest,
        {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 2},
    ),
    "/v1/completions": (completions.CompletionRequest, {"prompt": "w3", "max_tokens": 2}),
    "/v1/responses": (responses.ResponseRequest, {"input": "w3", "max_output_tokens": 2}),
}
WORDS = (
    *("user", "w3", "auto", "required", "function", "json_schema", "text", "message", "", "\x00"),
    *("role", "content", "type", "name", "arguments", "schema", "json_schema", "function"),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.sampled_from((0, 1, -1, 2, 1.5, 1e308))
    | st.sampled_from(WORDS)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    """A path, and a body that is valid but for some fields, or the bytes of one that are cut."""
    path = draw(st.sampled_from(sorted(BODIES)))
    model, plain = BODIES[path]
    names = [field.alias or name for name, field in model.model_fields.items()]
    changed = draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    body = json.dumps({**plain, **changed}).encode()
    if draw(st.integers(0, 9)) == 0:
        body = body[: draw(st.integers(0, len(body)))] + draw(st.binary(max_size=8))
    return path, body


@pytest.fixture(scope="module")
def loop():
    engine = ScriptedEngine()
    with asyncio.Runner() as runner:
        http = http_client(create_app(engine))
        yield lambda path, body: runner.run(
            http.post(path, content=body, headers={"content-type": "application/json"})
        )
    engine.close()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=bodies())
def test_no_body_is_an_error_of_the_server(loop, sent):
    path, body = sent
    answer = loop(path, body)
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 600
