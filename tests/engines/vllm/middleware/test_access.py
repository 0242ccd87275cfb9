"""Who comes through a server's door, and with what. No vLLM is needed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from pydantic import BaseModel
from typing_extensions import TypedDict

from cacheblend_rag.engines.vllm.middleware import access, bodies
from cacheblend_rag.engines.vllm.middleware.access import AccessMiddleware
from cacheblend_rag.engines.vllm.middleware.bodies import (
    LARGE_BYTES,
    MOST_TOKENS,
    MOST_VALUES,
    check_json,
)
from cacheblend_rag.engines.vllm.middleware.keys import (
    HOSTS_VARIABLE,
    KEY_VARIABLE,
    STORE_KEY_VARIABLE,
)
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import ConfigError
from tests.contracts.security import FOREIGN, HOSTS

ASK = "sesame"


class Asked:
    """An application behind a door, and what came of one request to it.

    status: None when the application was reached; then body is what it read and headers what it
    was given.
    """

    def __init__(
        self,
        body: bytes | Iterable[bytes] = b"",
        *,
        path: str = "/v1/completions",
        key: str | None = None,
        keys: Iterable[str] = (),
        kind: str = "http",
        method: str = "POST",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self.status: int | None = None
        self.sent: list[Any] = []
        self.body = b""
        self.headers: dict[bytes, bytes] = {}
        pieces = [body] if isinstance(body, bytes) else list(body)
        self._events: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        given = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {
            "type": kind,
            "path": path,
            "method": method,
            "headers": [*given, *headers],
            "app": SimpleNamespace(state=self._state(list(keys))),
        }
        asyncio.run(AccessMiddleware(self._application)(scope, self._receive, self._send))

    def _state(self, keys: list[str]) -> Any:
        return SimpleNamespace(args=SimpleNamespace(api_key=keys))

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers, self.path = dict(scope["headers"]), scope["path"]
        self.method = scope["method"]
        more = scope["type"] == "http"
        while more:
            event = await receive()
            self.body += event.get("body", b"")
            more = event.get("more_body", False)
        self.after = await receive()

    async def _receive(self) -> Any:
        return self._events.pop(0) if self._events else {"type": "http.disconnect"}

    async def _send(self, event: Any) -> None:
        self.sent.append(event)
        self.status = event.get("status", self.status)

    @property
    def said(self) -> str:
        return str(json.loads(self.sent[-1]["body"])["error"]["message"])


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KEY_VARIABLE, STORE_KEY_VARIABLE, bodies.BODY_VARIABLE, HOSTS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


# Keys


def test_without_a_key_a_page_reaches_nothing_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a websocket either; contracts ask by HTTP."""

    def is_refused(*headers: tuple[str, str], **more: Any) -> bool:
        given = [(name.encode(), value.encode()) for name, value in headers]
        told = Asked(path="/v1/realtime", kind="websocket", headers=given, **more)
        return [event["type"] for event in told.sent] == ["websocket.close"]

    for host in HOSTS:
        assert not is_refused(("host", host))
        assert not is_refused(("host", HOSTS[0]), ("origin", f"http://{host}"))
    for host in FOREIGN:
        assert is_refused(("host", host))
        assert is_refused(("host", HOSTS[0]), ("origin", f"http://{host}"))
    assert is_refused(("host", HOSTS[0]), ("origin", "null"))
    assert not is_refused(("host", FOREIGN[0]), keys=[ASK], key=ASK), "who has a key may"
    monkeypatch.setenv(HOSTS_VARIABLE, "gpu.example,evil.EXAMPLE")
    for host in FOREIGN[:2]:
        assert not is_refused(("host", host), ("origin", f"https://{host}"))
    assert is_refused(("host", "192.0.2.7"))


# Bodies


def test_a_body_comes_through_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b'{"prompt"', b': "a [ b { \\" ]', b'"}', b""]
    asked = Asked(pieces)
    assert asked.body == b"".join(pieces)
    assert asked.after == {"type": "http.disconnect"}, "what comes after it, too"
    monkeypatch.setenv(bodies.BODY_VARIABLE, "1")
    long = Asked(b" " * (1 << 19) for _ in range(3))
    assert (long.status, long.said) == (
        413,
        "the body is longer than 1 MiB (CACHEBLEND_MAX_BODY_MIB)",
    )


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.01)

    async def wait(self: Asked) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Asked, "_receive", wait)
    assert Asked().status == 408


@pytest.mark.parametrize("given", ["0", "many", ""])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(bodies.BODY_VARIABLE, given)
    with pytest.raises(ConfigError, match="CACHEBLEND_MAX_BODY_MIB="):
        Asked()


def test_halves_of_characters_are_refused() -> None:
    draw = random.Random(1)
    units = ["a", "\\", "\\\\", "u", "\ud83d", "\ude00", "\U0001f600", "\ue000", "\\ud800", '"']
    for _ in range(4000):
        text = "".join(draw.choices(units, k=draw.randrange(6)))
        try:
            json.loads(json.dumps(text)).encode()
            check_json(json.dumps({text: [text]}).encode())
        except UnicodeEncodeError:
            with pytest.raises(ApiError, match="unpaired surrogate"):
                check_json(json.dumps({text: [text]}).encode())


@pytest.mark.timeout(60)  # hours, where the square of its length counts
@pytest.mark.parametrize(
    "unit", ['"', '\\"', "[", "]", "{}", "[]", '"\\', '""', '"a":', "[[]", "\\", "\\ud83d\\ude00"]
)
def test_a_hostile_body_costs_what_its_length_does(unit: str) -> None:
    body = (unit * ((4 << 20) // len(unit))).encode()
    with suppress(ApiError):
        check_json(body)


MANY = MOST_VALUES + 1
TOO_MANY = {
    "content": {"messages": [{"role": "user", "content": [1] * MANY}]},
    "map": {"logit_bias": {str(index): 1 for index in range(MANY)}},
    "several": {"a": [1] * (MANY // 2), "b": [[]] * (MANY // 2)},
    "no ids": {"prompt": [1.5] * MANY},
    "prompts": {"prompt": [[1]] * MANY},
    "behind a name": {"stop": ["prompt", *[1] * MANY]},
    "ids": {"prompt": [1] * (MOST_TOKENS + 2)},
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_body_has_so_many_values(name: str) -> None:
    asked = Asked(json.dumps(TOO_MANY[name]).encode())
    assert asked.status == 400
    assert asked.said == "the body holds more than 65536 values, or 1048576 token ids"


def test_what_clients_send_is_not_too_much() -> None:
    part = {"type": "text", "text": 'a, "[1, 2]": {}, ' * 1000}
    field = {"type": "string", "description": "a, b"}
    tool = {"name": "look", "parameters": {"properties": {f"p{i}": field for i in range(50)}}}
    for body in (
        {"messages": [{"role": "user", "content": [part]}] * 800, "tools": [tool] * 128},
        {"prompt": list(range(1_000_000)), "stop": ["a", "b"]},
        {"n": 1, "prompt": [list(range(20_000))] * 32},
        {"chunks": ["a, b"] * 4096, "boundaries": ["c"] * 4096},
        {"logit_bias": {str(index): -100 for index in range(4000)}},
    ):
        sent = json.dumps(body, indent=1).encode()
        assert Asked([sent[: 1 << 20], sent[1 << 20 :]]).body == sent


def test_only_so_many_large_bodies_are_held_at_a_time() -> None:
    async def ask(door: AccessMiddleware, size: int, sent: list[Any]) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        async def send(event: Any) -> None:
            sent.append(event)

        state = SimpleNamespace(args=SimpleNamespace(api_key=[]))
        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        await door({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    async def run() -> None:
        free, reached = asyncio.Event(), 0

        async def application(scope: Any, receive: Any, send: Any) -> None:
            nonlocal reached
            reached += 1
            await free.wait()

        door, sent = AccessMiddleware(application), list[Any]()
        most, large = bodies.MOST_LARGE, LARGE_BYTES + 1
        held = [asyncio.create_task(ask(door, large, sent)) for _ in range(most)]
        while reached < most:
            await asyncio.sleep(0.01)
        await ask(door, large, sent)
        assert (sent[0]["status"], (b"retry-after", b"2") in sent[0]["headers"]) == (503, True)
        held.append(asyncio.create_task(ask(door, LARGE_BYTES, sent)))
        while reached <= most:
            await asyncio.sleep(0.01)
        free.set()
        await asyncio.gather(*held)
        await ask(door, large, sent)
        assert reached == most + 2

    asyncio.run(run())


def test_what_is_open_to_all_reads_no_body() -> None:
    for path, method in ((access.OPEN_PATH, "GET"), ("/v1/completions", "OPTIONS")):
        asked = Asked([b"[" * 100, b"[" * 100], path=path, method=method, keys=[ASK])
        assert asked.status is None, "nobody judged it"


class Text(TypedDict):
    type: Literal["text"]
    text: str


class Image(TypedDict):
    type: Literal["image"]
    url: str


class Turn(BaseModel):
    role: str
    content: str | list[Text | Image] | list[str]


class Body(BaseModel):
    messages: list[Turn | list[Turn]] = []
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [1] * 9000}]},
        {"stop": [1] * 9000},
        {"logit_bias": {str(index): "x" for index in range(9000)}},
    ],
)
def test_a_check_of_a_body_ends_at_its_first_error(body: dict[str, Any]) -> None:
    """Also in an application's own models, unions included."""
    app, counted = FastAPI(), list[int]()
    app.state.args = SimpleNamespace(api_key=[])
    app.add_middleware(AccessMiddleware)

    @app.post("/")
    async def answer(body: Body) -> None: ...

    @app.exception_handler(RequestValidationError)
    async def told(_: Any, error: Any) -> Response:
        counted.append(len(error.errors()))
        return Response(status_code=422)

    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/", json=body).status_code == 422
        assert client.post("/", json={"messages": [{"role": "user", "content": "a"}]}).is_success
    assert counted[0] < 20
