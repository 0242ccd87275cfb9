"""Whatever a client sends, the server answers with an error of the client's, or an answer."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import pytest
import torch
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag import load_tokenizer
from cacheblend_rag.api import chat, completions, responses
from cacheblend_rag.api.app import create_app
from cacheblend_rag.api.errors import of_validation
from cacheblend_rag.engines.transformers.guiding import Guides
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


def deep(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


HOSTILE_SCHEMAS: dict[str, Any] = {
    "deep": json.loads(deep(50)),
    "enum": {"enum": [f"value {i} {'x' * 50}" for i in range(10_000)]},
    "short enum": {"enum": list(range(30_000))},
    "properties": {"properties": {f"p{i}": {"type": "string"} for i in range(8000)}},
    "many properties": {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    "itself": {"$ref": "#"},
    "circle": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "all of itself": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema"},
    "doubling": {
        "$ref": "#/$defs/a0",
        "$defs": {
            **{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)},
            "a30": {"type": "object"},
        },
    },
    "product": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{k}": {"type": "string"}}} for k in range(3)]}
            for i in range(16)
        ]
    },
    "items": {"type": "array", "minItems": 100_000_000, "items": {"type": "string"}},
    "no items": {"allOf": [{"type": "array", "maxItems": 1e9}]},
    "many items": {
        "properties": {f"p{i}": {"type": "array", "minItems": 1000} for i in range(900)}
    },
    "pattern": {"type": "string", "pattern": "(x+x+)+y"},
    "powers": {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
    "long pattern": {"type": "string", "pattern": "(a|b)?" * 100_000},
    "multiple": {"type": "integer", "multipleOf": 987_654_321, "minimum": 3},
    "named otherwise": {"title": "maxItems", "type": "no type"},
}
HOSTILE_FORMS: dict[str, dict[str, Any]] = {
    "deep text": {"json": deep(300)},
    "deeper text": {"json": deep(100_000)},
    "regex": {"regex": "(.*a.{20})"},
    "states": {"regex": "[ab]*a[ab]{25}"},
    "long": {"regex": "(a|b)?" * 100_000},
    "brackets": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "counts": {"regex": "(a{1000}){1000}"},
    "rules": {"grammar": "start: " + "(" * 15_000 + '"a"' + ")" * 15_000},
    "endless": {"grammar": 'start: start start | "a" | \n'},
    "within": {"grammar": 'start: %json {"type": "array", "maxItems": 100000000}'},
    "choices": {"choice": [f"c{i}" for i in range(60_000)]},
}


class HoldingEngine(ScriptedEngine):
    """Compiles forms, and asks for the first token of each, as the embedded engine does."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._guides = Guides(tokenizer, len(tokenizer), [0])

    def _check_sampling(self, sampling: Any) -> None:
        if sampling.structured_outputs is not None:
            guide = self._guides.guide(sampling.structured_outputs)
            guide.allowed(torch.zeros(1, len(self.tokenizer)))


@pytest.fixture(scope="module")
def holding(smollm2_folder):
    engine = HoldingEngine(load_tokenizer("smollm2"))
    with asyncio.Runner() as runner:
        http = http_client(create_app(engine))
        yield lambda path, body: runner.run(http.post(path, json=body))
    engine.close()


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def asked_in_every_way(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    path, plain = "/v1/chat/completions", BODIES["/v1/chat/completions"][1]
    return [
        (path, {**plain, "response_format": form}),
        (path, {**plain, "tools": [tool(schema)], "tool_choice": "required"}),
        (path, {**plain, "tools": [tool({})], "response_format": form}),
        (
            "/v1/responses",
            {"input": "w3", "text": {"format": {**form["json_schema"], "type": form["type"]}}},
        ),
    ]


HOSTILE = [
    *(one for schema in HOSTILE_SCHEMAS.values() for one in asked_in_every_way(schema)),
    *(
        ("/v1/chat/completions", {**BODIES["/v1/chat/completions"][1], "structured_outputs": form})
        for form in HOSTILE_FORMS.values()
    ),
]
BODIES_OF_MANY = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 20_000}]}),
    ("/v1/chat/completions", {"messages": [1] * 8000}),
    ("/v1/chat/completions", {"stop": [1] * 20_000}),
    ("/v1/completions", {"prompt": [1.5] * 20_000}),
    ("/v1/completions", {"prompt": [["a"]] * 20_000}),
    ("/v1/responses", {"include": [1] * 20_000}),
    ("/v1/responses", {"metadata": {str(index): 1 for index in range(20_000)}}),
]


@pytest.mark.parametrize(("path", "more"), BODIES_OF_MANY)
def test_a_check_ends_at_the_first_error(path, more):
    """An error an entry would take seconds of the event loop, and gigabytes."""
    app, counted = create_app(ScriptedEngine()), []

    @app.exception_handler(RequestValidationError)
    async def told(_, error):
        counted.append(len(error.errors()))
        return of_validation(error.errors()).response()

    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post(path, json={**BODIES[path][1], **more})
    assert answer.status_code == 400
    assert next(iter(more)) in answer.json()["error"]["param"]
    assert counted[0] < 10


WRITTEN = ("response_format", "tools", "structured_outputs", "text.format")


def test_hostile_forms_are_compiled_or_refused_in_a_moment(holding):
    """Each takes seconds at most, on a busy machine; what is not bounded would take minutes."""
    for path, body in HOSTILE:
        began = time.process_time()
        answer = holding(path, body)
        assert time.process_time() - began < 30, str(body)[:200]
        assert answer.status_code in {200, 400}, answer.text
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert "\n" not in error["message"]
            if error["code"] == "context_length_exceeded":  # prompts hold the schemas of tools
                continue
            assert error["param"] in WRITTEN, error
            assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"tools": [{}] * 129}, "tools"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "tool", "content": "x"}] * 8193},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{}] * 129}]},
            "messages.0.tool_calls",
        ),
        ("/v1/responses", {"input": [{"type": "reasoning"}] * 8193}, "input"),
        ("/v1/responses", {"tools": [{}] * 129}, "tools"),
    ],
)
def test_too_many_entries_are_refused_by_their_field(holding, path, more, param):
    answer = holding(path, {**BODIES[path][1], **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} has too many entries: send at most ")
