"""Whatever strangers send over HTTP is answered, or refused in one line that names the field."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.contracts.served import (
    CHAT,
    DOCUMENTS,
    PASSAGE,
    RESPONSES,
    Served,
    tiny_model,
)
from tests.contracts.wire import (
    ASKED,
    HALVES,
    HEAD,
    PLAIN,
    TEXT,
    Routes,
    check,
    fuzzed,
    giants,
    half,
)

CASES = int(os.environ.get("CACHEBLEND_TEST_CASES", "400"))
HONEST_EVERY = 50


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that knows a document; it ends well, whatever is still half sent."""
    model = tiny_model(tmp_path_factory.mktemp("served"))
    with Served(model, "transformers", "--kv-path", str(model.parent / "kv")) as server:
        stored = server.ask("PUT", f"{DOCUMENTS}/honest", json={"chunks": [PASSAGE]})
        assert stored.json()["computed"] == 1
        yield server
        left = [half(server.port, sent) for sent in HALVES.values()]
        assert server.end() == 0
        for one in left:
            one.close()
        assert "Traceback" not in server.log


@pytest.fixture
def honest(server: Served) -> Iterator[Served]:
    """The server, whose answer about the document is the same before and after the test."""
    expected = server.answer(PASSAGE)["choices"]
    yield server
    assert server.answer(PASSAGE)["choices"] == expected


def test_no_message_is_an_error_of_the_server(honest: Served) -> None:
    routes, draw = Routes(honest.schema), random.Random(0)
    plain = {route: PLAIN.get(route) for route in routes}
    assert plain.keys() >= PLAIN.keys()
    expected, told = honest.answer(PASSAGE)["choices"], Counter[int]()
    for case in range(CASES):
        sent = fuzzed(routes, plain, draw)
        if (answer := sent.to(honest.http)) is None:
            continue
        check(sent, answer)
        told[answer.status_code] += 1
        if case % HONEST_EVERY == 0:
            assert honest.answer(PASSAGE)["choices"] == expected
    assert min(told[200], told[400]) > CASES // 10


def test_requests_that_fail_give_their_places_back(honest: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    for _ in range(80):  # more than may run and wait at once
        answer = honest.ask("POST", CHAT, json=body)
        assert answer.status_code == 400, "longer than the model's window"


@pytest.mark.parametrize(("route", "field", "value"), giants())
def test_lists_and_maps_are_bounded(
    honest: Served, route: tuple[str, str], field: str, value: Any
) -> None:
    method, path = route
    body = {**PLAIN[route], field: value}
    answer = honest.ask(method, path.replace("{document_id}", "bad"), json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert field in message or "the body holds more than 65536 values" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "give either chunks or text"),
        ({"chunks": [TEXT], "text": TEXT}, "give either chunks or text"),
        ({"chunks": []}, "chunks: chunks is invalid: List should have at least 1 item"),
        (
            {"chunks": [""]},
            "chunks.0: chunks.0 is invalid: String should have at least 1 character",
        ),
        ({"chunks": [TEXT, " \n"]}, "chunks.1: chunks.1 is only white space: leave it out"),
        ({"chunks": [TEXT, "w6 w7", TEXT]}, "chunks.2 is the same as chunks.0: give each once"),
        ({"chunks": TEXT}, "chunks: chunks is invalid: Input should be a valid array"),
        ({"chunks": [1]}, "chunks.0: chunks.0 is invalid: Input should be a valid string"),
        ({"chunks": [TEXT], "chunk_tokens": 64}, "chunk_tokens is for text"),
        ({"chunks": [TEXT], "boundaries": ["a", "b"]}, "boundaries has 2 entries for 1 chunks"),
        ({"text": TEXT, "boundaries": ["a"]}, "boundaries are of chunks"),
        ({"text": " \n "}, "text is only white space"),
        (
            {"text": TEXT, "chunk_tokens": 15},
            "chunk_tokens: chunk_tokens is invalid: Input should be greater",
        ),
        (
            {"text": TEXT, "chunk_tokens": "64"},
            "chunk_tokens: chunk_tokens is invalid: Input should be a valid",
        ),
        ({"chunks": [TEXT], "seperator": ""}, "seperator: seperator is invalid: Extra inputs"),
        (
            {"chunks": [TEXT], "separator": "x" * 257},
            "separator: separator is invalid: String should have",
        ),
        ({"chunks": ["x"] * 4097}, "chunks: chunks has too many entries: send at most 4096"),
        ([TEXT], "the body must be a JSON object"),
    ],
)
def test_a_wrong_document_is_refused_by_its_field(server: Served, body: Any, said: str) -> None:
    answer = server.ask("PUT", f"{DOCUMENTS}/wrong", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, said in f"{error['param']}: {error['message']}") == (400, True)
    assert server.ask("GET", f"{DOCUMENTS}/wrong").status_code == 404, "refused before it is begun"


@pytest.mark.parametrize("name", ["%0A", "%20", "a%00", "x" * 513, "a%E2%80%AEb", "%ff"])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_an_id_that_could_not_be_shown_is_refused(server: Served, method: str, name: str) -> None:
    body: Any = {"json": {"chunks": [TEXT]}} if method == "PUT" else {}
    answer = server.ask(method, f"{DOCUMENTS}/{name}", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "document_id")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", f"after={'x' * 513}"])
def test_a_wrong_page_is_refused(server: Served, query: str) -> None:
    answer = server.ask("GET", f"{DOCUMENTS}?{query}")
    named = query.partition("=")[0]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


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

FIELDS_OF_FORMS = ("response_format", "tools", "structured_outputs", "text.format")


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def asked_in_every_way(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield CHAT, {"response_format": form}
    yield CHAT, {"tools": [tool(schema)], "tool_choice": "required"}
    yield CHAT, {"tools": [tool({})], "response_format": form}
    yield RESPONSES, {"text": {"format": {**form["json_schema"], "type": form["type"]}}}


HOSTILE = {
    **{
        f"{name}, {way}": asked
        for at, (name, schema) in enumerate(HOSTILE_SCHEMAS.items())
        for way, asked in enumerate(asked_in_every_way(schema))
        if name == "deep" or way == at % 4  # one in all ways, the others in turn
    },
    **{name: (CHAT, {"structured_outputs": form}) for name, form in HOSTILE_FORMS.items()},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_compiled_or_refused(server: Served, name: str) -> None:
    """What is not bounded would take minutes, or the server's memory."""
    path, more = HOSTILE[name]
    answer = server.ask("POST", path, json={**PLAIN["POST", path], **more})
    assert answer.status_code in {200, 400}, answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert "\n" not in error["message"]
        if error["code"] != "context_length_exceeded":  # prompts hold the schemas of tools
            assert error["param"] in FIELDS_OF_FORMS, error
            assert error["message"].startswith(error["param"])


OTHERWISE: dict[str, tuple[dict[str, str], bytes, int, str]] = {
    "no type": ({}, ASKED, 400, "Content-Type: application/json"),
    "compressed": ({"content-encoding": "gzip"}, gzip.compress(ASKED), 415, "send it as it is"),
    "UTF-16": ({}, ASKED.decode().encode("utf-16"), 400, "UTF-8"),
    "half a character": ({}, ASKED.replace(b"Who", b"\\ud800"), 400, "unpaired surrogate"),
    "deep": ({}, b"[" * 65 + b"]" * 65, 400, "nested deeper than 64"),
    "no object": ({}, b"[]", 400, "JSON object"),
    "long": ({}, b" " * ((16 << 20) + 1), 413, "longer than 16 MiB"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_body_that_is_sent_otherwise_is_refused_with_what_to_do(
    honest: Served, name: str
) -> None:
    headers, body, status, said = OTHERWISE[name]
    if name != "no type":
        headers = {"content-type": "application/json", **headers}
    answer = honest.ask("POST", CHAT, content=body, headers=headers)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)


@pytest.mark.parametrize("what", HALVES)
def test_clients_that_hang_up_or_wait_hold_nobody_up(honest: Served, what: str) -> None:
    for _ in range(4):
        half(honest.port, HALVES[what]).close()
    waiting = [half(honest.port, HALVES[what]) for _ in range(4)]
    assert honest.answer("Who?")["choices"]
    for connection in waiting:
        connection.close()


def test_headers_of_no_end_close_their_connection(honest: Served) -> None:
    endless = half(honest.port, HEAD + b"A: ")
    sent = 0
    with suppress(OSError):
        while sent < 64 << 20:
            sent += endless.send(b"b" * (1 << 16))
    assert sent < 64 << 20
    endless.close()
