"""The key decides the namespace: the tenants' file, and what each key reaches; without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.engines.vllm.middleware import access
from cacheblend_rag.engines.vllm.middleware.access import AccessMiddleware
from cacheblend_rag.engines.vllm.middleware.keys import (
    KEY_VARIABLE,
    STORE_KEY_VARIABLE,
    STORERS_STATE,
    Grant,
    hash_of,
    new_entry,
    read_tenants,
)
from cacheblend_rag.engines.vllm.namespaces import (
    FIELD,
    TENANTS_VARIABLE,
    block_mark,
    current,
    namespace_of,
)
from cacheblend_rag.errors import ConfigError
from tests.engines.vllm.middleware import test_access

OWN, OWN_STORE = "own key", "own store key"
KEYS = {"acme": ("acme asks", "acme stores"), "globex": ("globex asks", "globex stores")}
DOCUMENTS = "/v1/cacheblend/documents"
CHAT = "/v1/chat/completions"


def hashed(key: str) -> str:
    return hash_of(key.encode())


def written(folder: Path, text: str | None = None) -> Path:
    """A tenants' file."""
    path = folder / "tenants.toml"
    tables = (
        f'[{name}]\nask = "{hashed(ask)}"\nstore = ["{hashed(store).upper()}"]\n'
        for name, (ask, store) in KEYS.items()
    )
    path.write_text("\n".join(tables) if text is None else text)
    return path


# The file


def test_new_keys_are_of_use_and_in_no_file(tmp_path: Path) -> None:
    made = {name: new_entry(name) for name in ("acme", 'a "quoted" \\ name', "名前")}
    path = tmp_path / "tenants.toml"
    path.write_text("".join(entry for _, _, entry in made.values()))
    granted = read_tenants(path)
    for name, (ask, store, entry) in made.items():
        assert granted[hashed(ask)] == Grant(name, may_change=False)
        assert granted[hashed(store)] == Grant(name, may_change=True)
        assert len({ask, store}) == 2
        assert ask not in entry
        assert store not in entry
    assert len({key for ask, store, _ in made.values() for key in (ask, store)}) == 6


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "CACHEBLEND_STORE_KEY"])
def test_the_servers_own_key_is_no_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(TENANTS_VARIABLE, str(written(tmp_path)))
    monkeypatch.setenv(name, "acme stores")
    with pytest.raises(ConfigError, match=r"store of .* is the server's own key"):
        AccessMiddleware(None)  # type: ignore[arg-type]


# How a namespace reaches the engine core


class Sent:
    """What vLLM's client sends to its engine core, as far as it is touched.

    Its own trace headers are those that vLLM takes from a client's: no other can be among them.
    """

    def __init__(self) -> None:
        self.trace_headers: dict[str, str] | None = {"traceparent": "00-1-2-01"}


class Core:
    """vLLM's client of the engine core: notes the namespace that each request has."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    async def add_request_async(self, request: Sent) -> None:
        assert request.trace_headers is not None
        assert request.trace_headers["traceparent"] == "00-1-2-01"
        self.seen.append(namespace_of(request))


class Client:
    """vLLM's engine client."""

    def __init__(self) -> None:
        self.engine_core = Core()

    async def generate(self) -> Any:
        yield await self.engine_core.add_request_async(Sent())


def test_no_salt_makes_blocks_look_like_anothers() -> None:
    """The mark ends every salt, and all marks are of one length."""
    marks = [block_mark(name) for name in (None, "default", "a", "b", "b a")]
    assert len(set(marks)) == 5
    assert {len(mark) for mark in marks} == {64}


# The middleware


class Asked(test_access.Asked):
    """A server with tenants, and what came of one request to it."""

    def __init__(
        self,
        path: str,
        key: str | None,
        *,
        keys: Iterable[str] = (OWN,),
        has_documents: bool = True,
        **more: Any,
    ) -> None:
        self.grant: Grant | None = None
        self.client, self._has_documents = Client(), has_documents
        super().__init__(path=path, key=key, keys=keys, **more)
        assert current.get() is None

    def _state(self, keys: list[str]) -> Any:
        state = super()._state(keys)
        state.engine_client = self.client
        if self._has_documents:
            vars(state)[STORERS_STATE] = object()
        return state

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        """Ask the model as vLLM's routes do: in a task of its own, too."""
        self.grant, self.headers = scope[access.GRANT], dict(scope["headers"])
        await self.client.engine_core.add_request_async(Sent())
        await asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        async for _ in self.client.generate():
            pass

    @property
    def namespaces(self) -> set[str | None]:
        return set(self.client.engine_core.seen)


@pytest.fixture
def tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's file of tenants, with its own keys beside it."""
    path = written(tmp_path)
    monkeypatch.setenv(TENANTS_VARIABLE, str(path))
    monkeypatch.setenv(STORE_KEY_VARIABLE, OWN_STORE)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return path


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_key_decides_the_namespace(kind: str) -> None:
    for name, keys in {**KEYS, "default": (OWN, OWN_STORE)}.items():
        for key, may_change in zip(keys, (False, True), strict=True):
            asked = Asked(CHAT, key, kind=kind)
            assert (asked.status, asked.grant) == (None, Grant(name, may_change))
            assert asked.namespaces == {name}, FIELD
            assert asked.headers[b"authorization"] == f"Bearer {OWN}".encode(), "vLLM's own check"


def test_without_own_keys_nobody_has_the_namespace_default(
    tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STORE_KEY_VARIABLE)
    for wrong in (None, "", OWN, OWN_STORE):
        assert Asked(CHAT, wrong, keys=()).status == 401
    tenants.write_text(f'[acme]\nask = "{hashed("x")}"')
    assert Asked(CHAT, "x", keys=()).grant == Grant("acme", may_change=False)


@pytest.mark.usefixtures("tenants")
def test_documents_that_nobody_answers_are_refused_by_name() -> None:
    refused = Asked(DOCUMENTS, OWN_STORE, method="GET", has_documents=False)
    assert refused.status == 501
    assert "VLLM_PLUGINS=cacheblend" in refused.said


@pytest.mark.usefixtures("tenants")
def test_a_vllm_that_cannot_carry_namespaces_serves_no_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Core, "add_request_async")
    refused = Asked(CHAT, "acme asks")
    assert refused.status == 503
    assert refused.grant is None
    assert "no engine_core.add_request_async" in refused.said
