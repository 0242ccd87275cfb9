"""Whatever a client sends, the server answers with an error of the client's, or an answer."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag import load_tokenizer
from cacheblend_rag.api import chat, completions, responses
from cacheblend_rag.api.app import create_app
from tests.api.conftest import http_client
from tests.api.scripted import ScriptedEngine

EXAMPLES = int(os.environ.get("CACHEBLEND_TEST_BODIES", "150"))
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


def some(**fields: Any) -> Any:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


NAMES = st.sampled_from(("weather", "a b", "", "x" * 200)) | SCALARS
FUNCTIONS = some(name=NAMES, arguments=SCALARS | st.just('{"a": 1}'), parameters=VALUES)
CALLS = some(id=SCALARS, type=st.sampled_from(("function", "x")) | SCALARS, function=FUNCTIONS)
MESSAGES = some(
    role=st.sampled_from(("user", "assistant", "system", "tool", "developer")),
    content=st.sampled_from(("w3", "", "{{ x }}", "<tool_call>")) | VALUES,
    tool_calls=st.lists(CALLS | VALUES, max_size=2) | st.none(),
    tool_call_id=st.sampled_from(("a", "")) | SCALARS,
    name=SCALARS,
)
CHATS = some(
    messages=st.lists(MESSAGES, min_size=1, max_size=4),
    tools=st.lists(CALLS | VALUES, max_size=2),
    tool_choice=st.sampled_from(("auto", "none", "required")) | CALLS,
    structured_outputs=some(json=VALUES, regex=SCALARS, choice=VALUES, grammar=SCALARS),
    response_format=some(type=st.just("json_schema"), json_schema=some(schema=VALUES)),
)
ITEMS = some(
    type=st.sampled_from(("message", "function_call", "function_call_output", "reasoning", "x")),
    role=st.sampled_from(("user", "assistant", "system")),
    content=st.just("w3") | st.lists(some(type=st.just("input_text"), text=SCALARS)) | VALUES,
    call_id=SCALARS,
    name=NAMES,
    arguments=SCALARS,
    output=VALUES,
)
RESPONSES = some(
    input=st.lists(ITEMS, max_size=3),
    tools=st.lists(some(type=st.just("function"), name=NAMES, parameters=VALUES), max_size=2),
    text=some(format=some(type=st.just("json_schema"), schema=VALUES)),
)


@st.composite
def chats(draw: Any) -> tuple[str, bytes]:
    """A path and a body whose messages, tools and forms are nearly right."""
    path = draw(st.sampled_from(("/v1/chat/completions", "/v1/responses")))
    nearly = draw(CHATS if path.endswith("completions") else RESPONSES)
    return path, json.dumps({**BODIES[path][1], **nearly}).encode()


@pytest.fixture(scope="module", params=["own", "smollm2"])
def loop(request):
    if request.param == "smollm2":
        request.getfixturevalue("smollm2_folder")
    engine = ScriptedEngine(load_tokenizer("smollm2") if request.param == "smollm2" else None)
    with asyncio.Runner() as runner:
        http = http_client(create_app(engine))
        yield lambda path, body: runner.run(
            http.post(path, content=body, headers={"content-type": "application/json"})
        )
    engine.close()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.one_of(bodies(), chats()))
def test_no_body_is_an_error_of_the_server(loop, sent):
    path, body = sent
    answer = loop(path, body)
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 600
