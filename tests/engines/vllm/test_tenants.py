"""The bundled model behind a real server with tenants, asked over HTTP by plain clients."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from shutil import which
from typing import Any

import httpx
import pytest

from cacheblend_rag import (
    BlendConfig,
    Document,
    Profile,
    SamplingParams,
    StoreConfig,
    open_engine,
)
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.namespaces import FIELD
from cacheblend_rag.engines.vllm.serve import RunningServer
from cacheblend_rag.errors import ConfigError
from tests.contracts.pages import blocks
from tests.engines.vllm.conftest import ServerFactory
from tests.kv.samples import until
from tests.readme import DOCS

OWN, OWN_STORE = "own key", "own store key"
TENANTS = ("acme", "globex")
DOCUMENTS = "/v1/cacheblend/documents"
PASSAGE = "The keeper of the old lighthouse wrote to the harbour master before dawn. " * 30
OTHER = "No ship may enter the northern dock while the red lamp is lit. " * 30

METADATA = "Metadata-Version: 2.1\nName: cacheblend-rag\nVersion: 0.1.0\n"
PLUGIN = "[vllm.endpoint_plugins]\ncacheblend = cacheblend_rag.api.vllm_plugin:DocumentsPlugin\n"

Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def server(start_server: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server with two tenants, over a folder; its entry points are these sources' own."""
    folder = tmp_path_factory.mktemp("tenants")
    info = folder / "metadata" / "cacheblend_rag-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(PLUGIN)
    tables = (
        f'[{name}]\nask = "{hashed(f"{name} asks")}"\nstore = "{hashed(f"{name} stores")}"\n'
        for name in TENANTS
    )
    (folder / "tenants.toml").write_text("".join(tables))
    paths = [str(info.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return start_server(
        MODEL_FOLDER,
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        served_name="demo",
        settings=ConnectorSettings(
            store=StoreConfig(kv_path=folder / "kv"),
            profile=Profile(blend=BlendConfig(cost_model=False)),
        ),
        tenants=folder / "tenants.toml",
        environment={
            "VLLM_API_KEY": OWN,
            "CACHEBLEND_STORE_KEY": OWN_STORE,
            "PYTHONPATH": os.pathsep.join(paths),
        },
    )


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def ask(server: RunningServer) -> Iterator[Ask]:
    """Send a request with a key."""
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def send(method: str, path: str, key: str, **content: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}", **content.pop("headers", {})}
            return client.request(method, path, headers=headers, **content)

        yield send


def hits(ask: Ask) -> tuple[int, int]:
    """Tokens that vLLM's prefix cache was asked for, and that it had, since the server started."""
    lines = ask("GET", "/metrics", OWN).text.splitlines()

    def total(name: str) -> int:
        return int(sum(float(one.split()[-1]) for one in lines if one.startswith(f"{name}{{")))

    return total("vllm:prefix_cache_queries_total"), total("vllm:prefix_cache_hits_total")


def cached(ask: Ask, path: str, key: str, body: dict[str, Any]) -> int:
    """Tokens that vLLM's prefix cache had for a request."""
    queries, before = hits(ask)
    answer = ask("POST", path, key, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 30
    while (now := hits(ask))[0] == queries:
        assert time.monotonic() < deadline, "the request was not counted"
    return now[1] - before


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROUTES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda t: {"messages": messages(t), "max_tokens": 2}),
    "chat, streamed": (
        "/v1/chat/completions",
        lambda t: {"messages": messages(t), "max_tokens": 2, "stream": True, "n": 2},
    ),
    "chat, in a session": (
        "/v1/chat/completions",
        lambda t: {
            "messages": messages(t),
            "max_tokens": 2,
            "session_id": "mine",
            "vllm_xargs": {FIELD: "globex", "session_id": "globex"},
        },
    ),
    "completions": ("/v1/completions", lambda t: {"prompt": t, "max_tokens": 2}),
    "completions, several": ("/v1/completions", lambda t: {"prompt": [t, t], "max_tokens": 2}),
    "responses": ("/v1/responses", lambda t: {"input": t, "max_output_tokens": 2}),
    "messages": ("/v1/messages", lambda t: {"messages": messages(t), "max_tokens": 2}),
    "tokens": (
        "/inference/v1/generate",
        lambda t: {
            "token_ids": [3 + ord(letter) for letter in t[:300]],
            "sampling_params": {"max_tokens": 2, "extra_args": {FIELD: "globex"}},
        },
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_carries_the_namespace(ask: Ask, route: str) -> None:
    """vLLM's own blocks are a namespace's: were it lost on the way, tenants would share them."""
    path, body = ROUTES[route]
    text = f"{sorted(ROUTES).index(route)} {route} {PASSAGE}"
    several = route in {"completions, several", "chat, streamed"}
    first = cached(ask, path, "acme asks", body(text))
    assert several or first == 0
    assert cached(ask, path, "acme asks", body(text)) >= 128
    assert cached(ask, path, "globex asks", body(text)) <= (first if several else 0)
    assert cached(ask, path, OWN, body(text)) <= (first if several else 0)


def test_no_tenant_finds_anothers_documents(server: RunningServer, ask: Ask) -> None:
    put = ask("PUT", f"{DOCUMENTS}/one/a.md", "acme stores", json={"chunks": [PASSAGE, OTHER]})
    assert (put.status_code, put.json()["computed"]) == (200, 2)
    assert ask("GET", f"{DOCUMENTS}/one/a.md", "globex stores").status_code == 404
    assert ask("DELETE", f"{DOCUMENTS}/one/a.md", "globex stores").status_code == 404
    assert ask("GET", DOCUMENTS, "globex stores").json()["data"] == []
    assert ask("GET", DOCUMENTS, "acme asks").status_code == 403
    shown = ask("GET", f"{DOCUMENTS}/one/a.md", "acme stores").json()["chunks"]
    assert [(one["text"], one["stored"]) for one in shown] == [(PASSAGE, True), (OTHER, True)]
    stats = {
        name: ask("GET", "/v1/cacheblend/stats", key).json()["stored_chunks"]
        for name, key in (("acme", "acme stores"), ("globex", "globex stores"), ("own", OWN_STORE))
    }
    assert stats == {"acme": 3, "globex": 0, "own": 0}, "one of them without its context, too"
    document = Document("one/a.md", (PASSAGE, OTHER))
    for namespace, key in (("acme", "acme asks"), ("globex", "globex asks"), ("default", OWN)):
        engine = open_engine(server.url, model="demo", api_key=key, namespace=namespace)
        engine.register([document])
        report = engine.generate(
            f"{PASSAGE}\n\n{OTHER}\n\nWho wrote?", SamplingParams(max_tokens=2)
        ).report
        assert [chunk.hit for chunk in report.chunks] == [namespace == "acme"] * 2
        engine.close()
    with pytest.raises(ConfigError, match="namespace='acme' is not the server's"):
        open_engine(server.url, model="demo", api_key="globex stores", namespace="acme")


def test_the_same_document_is_each_tenants_own(ask: Ask) -> None:
    for name in TENANTS:
        told = ask("PUT", f"{DOCUMENTS}/shared", f"{name} stores", json={"chunks": [OTHER * 2]})
        assert told.json()["computed"] == 1, "nothing of another's counts as stored"
    assert ask("DELETE", f"{DOCUMENTS}/shared", "acme stores").json()["evicted"] == 1
    (kept,) = ask("GET", f"{DOCUMENTS}/shared", "globex stores").json()["chunks"]
    assert kept["stored"] is True


def test_the_pages_describe_the_routes(ask: Ask) -> None:
    paths = ask("GET", "/openapi.json", "acme asks").json()["paths"]
    assert {f"{DOCUMENTS}/{{document_id}}", DOCUMENTS, "/v1/chat/completions"} <= set(paths)
    assert "swagger" in ask("GET", "/docs", "acme asks").text


def test_errors_are_openais(ask: Ask) -> None:
    for path, key, status in (
        (f"{DOCUMENTS}/a", "wrong", 401),
        (f"{DOCUMENTS}/a", "acme asks", 403),
        (f"{DOCUMENTS}/a", "acme stores", 400),
        ("/metrics", "acme stores", 403),
        ("/v1/cacheblend/release", "acme stores", 403),
    ):
        answer = ask("PUT", path, key, json={"chunks": []})
        assert answer.status_code == status
        message = answer.json()["error"]["message"]
        assert message
        assert "\n" not in message
    assert ask("POST", "/v1/cacheblend/release", OWN_STORE).json()["released_bytes"] >= 0


def test_a_plain_client_reuses_a_document_until_it_is_deleted(ask: Ask) -> None:
    passage = "A ferry that leaves at noon carries apples, letters and the village doctor. " * 30

    def reused(key: str, question: str) -> int:
        """Tokens that a plain chat request was spared; no two begin alike, for vLLM's own cache."""
        asked = {
            "model": "demo",
            "messages": messages(f"{question}\n\n{passage}"),
            "max_tokens": 2,
        }
        usage = ask("POST", "/v1/chat/completions", key, json=asked).json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    assert reused("acme asks", "one?") == 0
    ask("PUT", f"{DOCUMENTS}/found", "acme stores", json={"chunks": [passage]})
    turns = count()  # stored chunks become findable a moment later, on a thread
    assert until(lambda: reused("acme asks", f"{next(turns)} two?") > 100, 20)
    assert reused("globex asks", "three?") == 0
    assert ask("DELETE", f"{DOCUMENTS}/found", "acme stores").json()["evicted"] == 1
    assert reused("acme asks", "four?") == 0


def test_the_pages_examples_run(server: RunningServer) -> None:
    """Those of docs/http.md, with curl and in JavaScript, as they stand there."""
    bodies = [block.body for block in blocks(DOCS / "http.md")]
    (shell,) = [body for body in bodies if body.startswith("curl -X PUT")]
    (script,) = [body for body in bodies if "storeDocument(" in body]
    environment = {**os.environ, "CACHEBLEND_STORE_KEY": "acme stores"}
    ways = {"curl": ["bash", "-c", shell], "node": ["node", "--input-type=module", "-e", script]}
    for program, command in ways.items():
        if which(program) is None:
            continue
        command[-1] = command[-1].replace("http://127.0.0.1:8000", server.url)
        ended = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        assert "manuals/pump.md" in ended.stdout
        assert '"chunks":2' in ended.stdout or "chunks: 2" in ended.stdout
