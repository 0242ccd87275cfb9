"""A fuzzer of everything that strangers send; fields and routes are those of a server's schema."""

from __future__ import annotations

import json
import math
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tests.contracts.served import CHAT, COMPLETIONS, DOCUMENTS, RESPONSES
from tests.local_servers import HOST

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 2**63, 10**400, 1e308, math.nan, math.inf, "", "abc", "\x00",
    "\ud800", "0" * 32, "x" * 100_000, [], {}, [[]], {"a": {}}, {"type": 1}, [0] * 10_000,
    {"\ud800": 1}, [None], [{}], [1, "2"], [math.nan],
)  # fmt: skip
ONE = f"{DOCUMENTS}/{{document_id}}"
TEXT = "w1 w2 w3 w4 w5"
PLAIN: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", CHAT): {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2},
    ("POST", COMPLETIONS): {"prompt": "Who?", "max_tokens": 2},
    ("POST", RESPONSES): {"input": "Who?", "max_output_tokens": 2},
    ("PUT", ONE): {"chunks": ["Who?"], "separator": " "},
}
"""An honest body of each route that reads one."""
ASKED = json.dumps(PLAIN["POST", CHAT]).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
STREAMED = json.dumps({**PLAIN["POST", CHAT], "max_tokens": 400, "stream": True}).encode()
HALVES = {
    "nothing": b"",
    "half a line": HEAD[:9],
    "half the headers": HEAD,
    "no body": HEAD + JSON % 1000,
    "half a body": HEAD + JSON % 1000 + ASKED,
    "a body where none is read": b"GET /health HTTP/1.1\r\nHost: a\r\n" + JSON % 99999 + b"[",
    "a stream that nobody reads": HEAD + JSON % len(STREAMED) + STREAMED,
}
"""Requests without their end, or whose answer nobody reads."""
NAMES = (
    *("kept", "a", "a/b", "..", "%2e%2e", "%00", "%0a", "%ff", "x" * 600, "", "?x=1", "😀"),
    *("../models", "a%E2%80%AEb", "%"),
)
WORDS = (
    *("role", "content", "type", "text", "name", "function", "arguments", "parameters", "schema"),
    *("json", "regex", "choice", "grammar", "json_schema", "tool_calls", "tool_call_id", "id"),
    *("user", "assistant", "tool", "message", "input_text", "function_call", "object", "string"),
)
"""What the fields are called, and hold, of which a schema says nothing."""
MEANT = {501, 503}
"""A server's errors that are right: no such feature, too much at once."""
OF_THE_BODY = ("nested deeper", "unpaired surrogate", "JSON", "more than 65536 values")
"""What is wrong with a body as a whole."""


@dataclass(frozen=True)
class Sent:
    """A request. field: the only one of its body, or of its query, that was changed."""

    method: str
    path: str
    body: bytes = b""
    field: str | None = None

    def to(self, http: httpx.Client, **headers: str) -> httpx.Response | None:
        """Send it; returns the answer, None for what httpx itself does not send."""
        kind = {"content-type": "application/json"} if self.body else {}
        try:
            return http.request(
                self.method, self.path, content=self.body, headers={**kind, **headers}
            )
        except (httpx.LocalProtocolError, httpx.InvalidURL):
            return None


def mutated(
    value: Any, draw: random.Random, deepest: int = 900, hostile: Sequence[Any] = HOSTILE
) -> Any:
    """Return a JSON value with something in it replaced, left out or added.

    hostile: what is put there, beside lists up to ``deepest`` levels deep.
    """
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return nested(draw.randrange(deepest)) if draw.random() < 0.02 else draw.choice(hostile)
    changed = dict(value) if isinstance(value, dict) else list(value)
    index = draw.choice(list(changed)) if isinstance(value, dict) else draw.randrange(len(value))
    change = draw.random()
    if change < 0.1:
        del changed[index]
    elif change < 0.2 and isinstance(changed, dict):
        changed[draw.choice(["colour", "", "x" * 1000])] = draw.choice(hostile)
    else:
        changed[index] = mutated(value[index], draw, deepest, hostile)
    return changed


def nested(depth: int) -> Any:
    """Return a list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def cut(data: bytes, draw: random.Random) -> bytes:
    """Return bytes of which some are flipped, replaced, taken out or cut off."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(changed))
        match draw.choice(["bit", "number", "gap", "end"]):
            case "bit":
                changed[place] ^= 1 << draw.randrange(8)
            case "number":
                number = draw.choice([0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
                changed[place : place + 8] = number.to_bytes(8, "little")
            case "gap":
                del changed[place : place + draw.randint(1, 16)]
            case "end" if draw.random() < 0.2:
                del changed[max(place, 1) :]
    return bytes(changed)


class Routes:
    """The routes of a server, by its ``/openapi.json``."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schemas = schema.get("components", {}).get("schemas", {})
        self._named = {
            (method.upper(), path): operation
            for path, methods in schema["paths"].items()
            for method, operation in methods.items()
        }

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield methods and paths."""
        return iter(self._named)

    def fields(self, method: str, path: str) -> dict[str, Any]:
        """Return the fields of a route's body, with the schema of each."""
        content = self._named[method, path].get("requestBody", {}).get("content", {})
        return self._fields(content.get("application/json", {}).get("schema", {}))

    def queries(self, method: str, path: str) -> dict[str, Any]:
        """Return the parameters of a route's query, with the schema of each."""
        given = self._named[method, path].get("parameters", [])
        return {one["name"]: one["schema"] for one in given if one["in"] == "query"}

    def value(self, schema: Any, draw: random.Random, depth: int = 0) -> Any:
        """Return a value as a schema asks for, or nearly."""
        schema = self._resolved(schema)
        if branches := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(draw.choice(branches), draw, depth)
        if "enum" in schema or "const" in schema:
            return draw.choice([*schema.get("enum", []), schema.get("const", "x")])
        match schema.get("type"):
            case "string":
                return draw.choice(["", "w3", "auto", "required", "json_schema", "user", "\n"])
            case "integer" | "number":
                return draw.choice([0, 1, 2, -1, schema.get("maximum", 3), 0.5])
            case "boolean":
                return draw.random() < 0.5
            case "array":
                inner = schema.get("items", {})
                return [self.value(inner, draw, depth + 1) for _ in range(draw.randrange(3))]
            case "null":
                return None
        own = self._fields(schema)
        if depth > 4:
            return draw.choice(HOSTILE)
        if not own:
            return self._anything(draw, depth)
        needed = schema.get("required", [])
        return {
            name: self.value(inner, draw, depth + 1)
            for name, inner in own.items()
            if name in needed or draw.random() < 0.4
        }

    def _anything(self, draw: random.Random, depth: int) -> Any:
        """Return a value of what the schema says nothing of: messages' parts, tools, forms."""
        inner = [draw.choice(WORDS), draw.choice(HOSTILE)]
        inner += [self._anything(draw, depth + 1) for _ in range(2 if depth < 4 else 0)]
        if draw.random() < 0.3:
            return draw.choice([inner, inner[1:2], inner[0]])
        return {draw.choice(WORDS): one for one in draw.sample(inner, draw.randint(1, len(inner)))}

    def _fields(self, schema: Any) -> dict[str, Any]:
        schema = self._resolved(schema)
        branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
        found = dict(schema.get("properties", {}))
        for branch in branches:
            found.update(self._fields(branch))
        return found

    def _resolved(self, schema: Any) -> Any:
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema if isinstance(schema, dict) else {}


def fuzzed(
    routes: Routes, plain: Mapping[tuple[str, str], Any], draw: random.Random, kept: Any = ()
) -> Sent:
    """Return a request of one of the routes in ``plain`` in which something is wrong, mostly.

    plain: by method and path, an honest body; None where none is read. kept: fields that stay as
    they are there.
    """
    method, path = draw.choice(list(plain))
    fields, honest = routes.fields(method, path), plain[method, path]
    queries, field = routes.queries(method, path), None
    where = path.replace("{model}", "{document_id}")
    if "{document_id" in where:
        where = where[: where.index("{")] + draw.choice(NAMES)
    if queries and draw.random() < 0.5:
        field = draw.choice(list(queries))
        sent = draw.choice([self_told(draw), str(routes.value(queries[field], draw))])
        where = f"{where}{'&' if '?' in where else '?'}{field}={quote(sent[:9000])}"
    if honest is None:
        return Sent(method, where, field=None if "{" in path else field)
    body = json.loads(json.dumps(honest))
    if draw.random() < 0.2:
        body, changed = mutated(body, draw), []
    else:
        changed = draw.sample([name for name in fields if name not in kept], draw.randint(1, 2))
    for name in changed:
        value = routes.value(fields[name], draw)
        body[name] = draw.choice([value, mutated(value, draw), draw.choice(HOSTILE)])
    sent_body = json.dumps(body).encode()
    if draw.random() < 0.05:
        return Sent(method, where, cut(sent_body, draw))
    if draw.random() < 0.02:
        rubbish = [b"{", b"\xff" * 100, b"[" * 10_000, b'{"a":' * 90 + b"}" * 90, b"\0", b"null"]
        return Sent(method, where, draw.choice(rubbish))
    one = changed[0] if len(changed) == 1 and "{" not in path else None
    return Sent(method, where, sent_body, one)


def giants() -> list[tuple[tuple[str, str], str, Any]]:
    """Return routes, and a field whose size once took a server or its memory, with its value."""
    chat, completions, responses, document = PLAIN
    user, names = {"role": "user"}, {str(index): 1 for index in range(70_000)}
    return [
        (chat, "messages", [{**user, "content": [1] * 30_000}]),
        (chat, "messages", [{**user, "content": [1] * 130_000}]),
        (chat, "messages", [{}] * 8000),
        (chat, "messages", [{**user, "content": "x"}] * 8193),
        (chat, "messages", [{"role": "assistant", "tool_calls": [{}] * 129}]),
        (chat, "stop", [1] * 30_000),
        (chat, "stop", ["a"] * 30_000),
        (chat, "logit_bias", names),
        (chat, "tools", [{}] * 129),
        (chat, "structured_outputs", {"choice": ["ab"] * 130_000}),
        (completions, "prompt", [1.5] * 30_000),
        (completions, "prompt", [1] * 1_100_000),
        (completions, "prompt", [["a"]] * 30_000),
        (responses, "input", [{"type": "reasoning"}] * 8193),
        (responses, "tools", [{}] * 129),
        (responses, "include", [1] * 30_000),
        (responses, "metadata", names),
        (document, "colour", names),
        (document, "chunks", [1] * 30_000),
        (document, "chunks", ["a"] * 4097),
    ]


def self_told(draw: random.Random) -> str:
    """Return text for a query: a hostile value as it is written."""
    value = draw.choice([one for one in HOSTILE if "ud800" not in repr(one)])
    return str(value)


def check(sent: Sent, answer: httpx.Response) -> None:
    """Assert that an answer is one, or a client's error in one line that names the field."""
    shown = f"{sent.method} {sent.path[:80]} {sent.body[:300]!r}: {answer.text[:300]}"
    assert answer.status_code < 500 or answer.status_code in MEANT, shown
    assert "Traceback" not in answer.text, shown
    if answer.status_code < 400:
        return
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}, shown
    message = error["message"]
    assert message, shown
    assert len(message.splitlines()) == 1, shown
    assert len(message) < 600, shown
    if sent.field and answer.status_code == 400:
        told = f"{error['param']} {message}"
        assert sent.field in told or any(one in message for one in OF_THE_BODY), shown


def half(port: int, sent: bytes) -> socket.socket:
    """Return a connection on which so much was sent."""
    connection = socket.create_connection((HOST, port), timeout=60)
    connection.sendall(sent)
    return connection
