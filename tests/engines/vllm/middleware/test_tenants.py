"""The key decides the namespace: the tenants' file, and what each key reaches; without vLLM."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.engines.vllm import namespaces
from cacheblend_rag.engines.vllm.middleware import access
from cacheblend_rag.engines.vllm.middleware.access import AccessMiddleware
from cacheblend_rag.engines.vllm.middleware.tenants import (
    TENANTS_VARIABLE,
    Grant,
    Tenants,
    new_entry,
    read_tenants,
)
from cacheblend_rag.engines.vllm.namespaces import (
    FIELD,
    SECRET_VARIABLE,
    block_mark,
    current,
    new_secret,
    read_signed,
    signed,
    with_namespace,
)
from cacheblend_rag.errors import ConfigError
from tests.engines.vllm.middleware import test_access

SECRET = "5" * 64
OWN, OWN_STORE = "own key", "own store key"
KEYS = {"acme": ("acme asks", "acme stores"), "globex": ("globex asks", "globex stores")}
DOCUMENTS = "/v1/cacheblend/documents"
CHAT = "/v1/chat/completions"


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


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


def test_a_key_belongs_to_one_namespace(tmp_path: Path) -> None:
    tenants = Tenants(written(tmp_path))
    for name, (ask, store) in KEYS.items():
        assert tenants.grant(ask.encode()) == Grant(name, may_change=False)
        assert tenants.grant(store.encode()) == Grant(name, may_change=True)
    for wrong in (b"", b"acme", hashed("acme asks").encode(), b"acme asks ", b"\xff" * 100):
        assert tenants.grant(wrong) is None


def test_new_keys_are_of_use_and_in_no_file(tmp_path: Path) -> None:
    made = {name: new_entry(name) for name in ("acme", 'a "quoted" \\ name', "名前")}
    path = tmp_path / "tenants.toml"
    path.write_text("".join(entry for _, _, entry in made.values()))
    tenants = Tenants(path)
    for name, (ask, store, entry) in made.items():
        assert tenants.grant(ask.encode()) == Grant(name, may_change=False)
        assert tenants.grant(store.encode()) == Grant(name, may_change=True)
        assert len({ask, store}) == 2
        assert ask not in entry
        assert store not in entry
    assert len({key for ask, store, _ in made.values() for key in (ask, store)}) == 6


def test_a_file_that_is_none_is_told_apart(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_tenants(path)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "CACHEBLEND_STORE_KEY"])
def test_the_servers_own_key_is_no_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(TENANTS_VARIABLE, str(written(tmp_path)))
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv(name, "acme stores")
    with pytest.raises(ConfigError, match=r"store of .* is the server's own key"):
        AccessMiddleware(None)  # type: ignore[arg-type]


# What a namespace is signed with


def test_nobody_names_a_namespace_without_the_secret() -> None:
    told = signed("acme", SECRET)
    assert read_signed(told, SECRET) == "acme"
    other = signed("globex", SECRET)
    for forged in (
        "acme",
        "",
        None,
        5,
        told[:-1],
        told + "x",
        f"{told[:64]}globex",
        f"{other[:64]}acme",
        told.upper(),
        signed("acme", new_secret()),
        "\ud800" * 70,
        f"{'0' * 64}acme",
    ):
        assert read_signed(forged, SECRET) is None
    assert read_signed(signed("acme", ""), "") is None, "without a secret there is no namespace"
    marks = {block_mark(name, secret) for name in ("a", "b", "") for secret in (SECRET, "x")}
    assert len(marks) == 6
    assert not any(mark in signed("a", SECRET) for mark in marks)


class Params:
    """vLLM's SamplingParams, as far as they are touched."""

    def __init__(self, extra_args: dict[str, Any] | None = None) -> None:
        self.extra_args = extra_args

    def clone(self) -> Params:
        return Params(self.extra_args)


def test_a_clients_own_word_is_replaced_and_its_parameters_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    given = Params({FIELD: signed("globex", "guess"), "session_id": "mine"})
    made = with_namespace(given, "acme")
    assert made.extra_args == {FIELD: signed("acme", SECRET), "session_id": "mine"}
    assert given.extra_args != made.extra_args, "others may share them"
    assert with_namespace(Params(), "acme").extra_args == {FIELD: signed("acme", SECRET)}
    of_another_kind = object()
    assert with_namespace(of_another_kind, "acme") is of_another_kind


class Client:
    """vLLM's engine client: notes the namespace that each request has."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, Any]] = []

    async def add_request(self, request_id: str, prompt: Any, params: Any, **named: Any) -> str:
        sent = (params.extra_args or {}).get(FIELD)
        self.seen.append((read_signed(sent, SECRET), named))
        return request_id

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        yield await self.add_request(request_id, prompt, params, session_id="s")


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
            vars(state)[access.DOCUMENTS_STATE] = object()
        return state

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        """Ask the model as vLLM's routes do: in a task of its own, too."""
        self.grant, self.headers = scope[access.GRANT], dict(scope["headers"])
        await self.client.add_request("r1", "?", Params({FIELD: "globex"}))
        await asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        async for _ in self.client.generate("?", Params(), "r2"):
            pass

    @property
    def namespaces(self) -> set[str | None]:
        return {name for name, _ in self.client.seen}


@pytest.fixture
def tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's file of tenants, with its own keys beside it."""
    path = written(tmp_path)
    monkeypatch.setenv(TENANTS_VARIABLE, str(path))
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv(access.STORE_KEY_VARIABLE, OWN_STORE)
    monkeypatch.delenv(access.KEY_VARIABLE, raising=False)
    return path


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_key_decides_the_namespace(kind: str) -> None:
    for name, keys in {**KEYS, "default": (OWN, OWN_STORE)}.items():
        for key, may_change in zip(keys, (False, True), strict=True):
            asked = Asked(CHAT, key, kind=kind)
            assert (asked.status, asked.grant) == (None, Grant(name, may_change))
            assert asked.namespaces == {name}
            assert asked.headers[b"authorization"] == f"Bearer {OWN}".encode(), "vLLM's own check"


def test_without_own_keys_nobody_has_the_namespace_default(
    tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(access.STORE_KEY_VARIABLE)
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
    monkeypatch.delattr(Client, "add_request")
    refused = Asked(CHAT, "acme asks")
    assert refused.status == 503
    assert refused.grant is None
    assert "no add_request" in refused.said


def test_it_does_not_start_with_a_wrong_file_or_without_a_secret(
    tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants.write_text("[acme]")
    with pytest.raises(ConfigError, match="must have ask = and store ="):
        AccessMiddleware(None)  # type: ignore[arg-type]
    written(tenants.parent)
    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(ConfigError, match=f"{TENANTS_VARIABLE} needs {SECRET_VARIABLE}"):
        AccessMiddleware(None)  # type: ignore[arg-type]


def test_without_tenants_nothing_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TENANTS_VARIABLE, SECRET_VARIABLE, access.STORE_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    asked = Asked(CHAT, OWN)
    assert asked.namespaces == {None}
    assert asked.grant == Grant("default", may_change=True)
    assert namespaces.known_secret() == ""
