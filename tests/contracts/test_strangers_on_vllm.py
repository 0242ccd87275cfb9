"""A vLLM server with tenants: whatever strangers send, and who reaches what."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from shutil import which
from threading import Thread
from typing import Any

import httpx
import pytest

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    ConfigError,
    Document,
    EngineUnavailableError,
    SamplingParams,
    open_engine,
)
from tests.contracts.pages import blocks
from tests.contracts.security import ASKS, KEYS, METHODS, OURS, UNKNOWN, WHOLE, refusal
from tests.contracts.served import (
    ASK,
    CHAT,
    COMPLETIONS,
    DOCUMENTS,
    PASSAGE,
    STORE,
    Served,
    tiny_model,
)
from tests.contracts.wire import HALVES, PLAIN, Routes, check, fuzzed, giants, half, mutated
from tests.local_servers import HOST
from tests.readme import DOCS

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
CASES = 120
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
FLAGS += ("--enable-prompt-tokens-details", "--enable-scale-out")
NO_PATH = {"detail": "Not Found"}
"""What vLLM itself says where there is nothing."""
FERRY = "A ferry that leaves at noon carries apples, letters and the village doctor. " * 2
TENANTS = ("acme", "globex")
JOBS = "/v1/cacheblend/jobs"
ROWS = {
    **OURS,
    "/tokenize": ASKS,
    "/detokenize": ASKS,
    "/ping": ASKS,
    "/invocations": ASKS,
    "/v1/messages": ASKS,
    "/inference/v1/generate": ASKS,
}
"""What is neither here nor below what is for who asks concerns the whole server."""
CHANGES = {"/scale_elastic_ep", "/is_scaling_elastic_ep"}
"""What would change the server, or wait, if it were asked with its own key."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys of its own and two tenants; no key is in its log."""
    model = tiny_model(tmp_path_factory.mktemp("served"))
    tenants = model.parent / "tenants.toml"
    tables = (
        f'[{name}]\nask = "{hashed(f"{name} asks")}"\nstore = "{hashed(f"{name} stores")}"\n'
        for name in TENANTS
    )
    tenants.write_text("".join(tables))
    flags = ("--kv-path", str(model.parent / "kv"), "--tenants", str(tenants), *FLAGS)
    own = {"VLLM_API_KEY": ASK, "CACHEBLEND_STORE_KEY": STORE, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with Served(model, "vllm", *flags, **own) as server:
        yield server
        left = [half(server.port, sent) for sent in HALVES.values()]
        server.end()  # with vLLM's own code
        for one in left:
            one.close()
        assert not any(key in server.log for key in KEYS.values() if key and key != "guess")


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()


@pytest.fixture
def honest(server: Served) -> Iterator[Served]:
    """The server, whose answer is the same before and after the test."""
    expected = server.answer("Who wrote?", ASK)["choices"]
    yield server
    assert server.answer("Who wrote?", ASK)["choices"] == expected


# Who reaches what


def kind(path: str) -> str:
    asked = any(path.startswith(f"{row}/") for row, of in ROWS.items() if of == ASKS)
    return ROWS.get(path, ASKS if asked else WHOLE)


@pytest.mark.parametrize("who", KEYS)
def test_each_key_reaches_its_routes_and_no_other(server: Served, who: str) -> None:
    """What has no row here, such as a route of a new vLLM, is for the server's own keys."""
    listed = server.schema["paths"]
    assert {path for _, path in PLAIN} <= listed.keys()
    for path in {**dict.fromkeys(listed, ""), **ROWS, UNKNOWN: ""}:
        expected = refusal(who, kind(path))
        if expected is None and path in CHANGES:
            continue
        for method in METHODS:
            body = {} if method == "GET" else {"json": {}}
            answer = server.ask(method, path, KEYS[who], **body)
            told = f"{who}: {method} {path}: {answer.status_code} {answer.text[:200]}"
            assert not any(key in answer.text for key in (ASK, STORE)), told
            if expected is None:
                assert answer.status_code not in {401, 403}, told
            else:
                assert answer.status_code == expected, told
                assert method == "HEAD" or "\n" not in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def documents(server: Served) -> Served:
    """The server, with a document in one namespace, and one of the same name in two."""
    for name in TENANTS:
        same = {"chunks": [PASSAGE]}
        stored = server.ask("PUT", f"{DOCUMENTS}/same", f"{name} stores", json=same)
        assert stored.json()["computed"] == 1, "nothing of another's counts as stored"
    one = {"chunks": [FERRY]}
    assert server.ask("PUT", f"{DOCUMENTS}/one/a.md", "acme stores", json=one).is_success
    return server


@pytest.mark.parametrize(
    ("key", "listed"),
    [("acme stores", ["one/a.md", "same"]), ("globex stores", ["same"]), (STORE, [])],
)
def test_who_stores_sees_what_is_in_its_namespace(
    documents: Served, key: str, listed: list[str]
) -> None:
    told = documents.ask("GET", DOCUMENTS, key).json()["data"]
    assert [one["id"] for one in told if not one["id"].startswith("of/")] == listed
    stats = documents.ask("GET", "/v1/cacheblend/stats", key).json()
    assert (stats["documents"] >= len(listed), stats["stored_chunks"] > 0) == (True, bool(listed))
    for name, text in (("one/a.md", FERRY), ("same", PASSAGE)):
        answer = documents.ask("GET", f"{DOCUMENTS}/{name}", key)
        if name in listed:
            (chunk,) = answer.json()["chunks"]
            assert (chunk["text"], chunk["stored"]) == (text, True)
        else:
            assert answer.status_code == 404
            assert documents.ask("DELETE", f"{DOCUMENTS}/{name}", key).status_code == 404


CLAIMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "headers": {"headers": {"x-cacheblend-namespace": "acme", "x-session-id": "acme"}},
    "fields": {"session_id": "acme", "namespace": "acme"},
    "arguments": {"vllm_xargs": {"cacheblend_namespace": "acme", "session_id": "acme"}},
    "parameters": {"kv_transfer_params": {"cacheblend": {"namespace": "acme"}}},
}


def reused(server: Served, text: str, key: str, **more: Any) -> int:
    """Tokens of a text that a plain chat was spared; its question begins as no other's."""
    headers = more.pop("headers", {})
    question = f"{random.Random().getrandbits(64):x}?"
    body = {"messages": [{"role": "user", "content": f"{question} {text}"}], "max_tokens": 2}
    sent = {**body, **more}
    usage = server.ask("POST", CHAT, key, json=sent, headers=headers).json()["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_key_alone_decides_whose_chunks_are_reused(documents: Served, claim: str) -> None:
    end = time.monotonic() + 60
    while reused(documents, FERRY, "acme asks") < len(FERRY) / 2:  # findable a moment later
        assert time.monotonic() < end
    for other in ("globex asks", ASK):
        assert reused(documents, FERRY, other, **CLAIMS[claim]) < len(FERRY) / 2


def test_a_tenants_document_goes_alone(documents: Served) -> None:
    for name in ("same", "one/a.md"):
        told = documents.ask("DELETE", f"{DOCUMENTS}/{name}", "acme stores").json()
        assert (told["deleted"], told["evicted"]) == (True, 1)
    assert reused(documents, FERRY, "acme asks") < len(FERRY) / 2
    (kept,) = documents.ask("GET", f"{DOCUMENTS}/same", "globex stores").json()["chunks"]
    assert kept["stored"] is True


def test_a_client_of_another_namespace_is_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="namespace='acme' is not the server's"):
        opened(server.url, server, "globex stores", monkeypatch, namespace="acme")


def test_a_wrong_key_is_one_line_and_told_by_nothing(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineUnavailableError, match="refuses the API key") as error:
        opened(server.url, server, "guess", monkeypatch)
    assert "guess" not in str(error.value)
    assert "\n" not in str(error.value)


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROUTES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": (CHAT, lambda t: {"messages": messages(t), "max_tokens": 2}),
    "chat, streamed": (
        CHAT,
        lambda t: {"messages": messages(t), "max_tokens": 2, "stream": True, "n": 2},
    ),
    "chat, in a session": (
        CHAT,
        lambda t: {"messages": messages(t), "max_tokens": 2, **CLAIMS["arguments"]},
    ),
    "completions": (COMPLETIONS, lambda t: {"prompt": t, "max_tokens": 2}),
    "completions, several": (COMPLETIONS, lambda t: {"prompt": [t, t], "max_tokens": 2}),
    "responses": ("/v1/responses", lambda t: {"input": t, "max_output_tokens": 2}),
    "tokens": (
        "/inference/v1/generate",
        lambda t: {
            "token_ids": [3 + ord(letter) % 256 for letter in t[:300]],
            "sampling_params": {
                "max_tokens": 2,
                "extra_args": {"cacheblend_namespace": "globex"},
            },
        },
    ),
    "messages": ("/v1/messages", lambda t: {"messages": messages(t), "max_tokens": 2}),
}


def hits(server: Served) -> tuple[int, int]:
    """Tokens that vLLM's prefix cache was asked for, and that it had, since the server started."""
    lines = server.ask("GET", "/metrics", ASK).text.splitlines()

    def total(name: str) -> int:
        return int(sum(float(one.split()[-1]) for one in lines if one.startswith(f"{name}{{")))

    return total("vllm:prefix_cache_queries_total"), total("vllm:prefix_cache_hits_total")


def cached(server: Served, path: str, key: str, body: dict[str, Any]) -> int:
    """Tokens that vLLM's prefix cache had for a request."""
    queries, before = hits(server)
    answer = server.ask("POST", path, key, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    end = time.monotonic() + 60
    while (now := hits(server))[0] == queries:
        assert time.monotonic() < end, "the request was not counted"
    return now[1] - before


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_carries_the_namespace(server: Served, route: str) -> None:
    """vLLM's own blocks are a namespace's: were it lost on the way, tenants would share them."""
    path, body = ROUTES[route]
    text = f"{sorted(ROUTES).index(route)} {route} {PASSAGE * 2}"
    several = route in {"completions, several", "chat, streamed"}
    first = cached(server, path, "acme asks", body(text))
    assert several or first == 0
    assert cached(server, path, "acme asks", body(text)) >= 128
    for other in ("globex asks", ASK):
        assert cached(server, path, other, body(text)) <= (first if several else 0)


# What strangers send


def test_a_passage_holds_no_control_token(server: Served) -> None:
    """A token a byte: as text it takes ten of them."""

    def stored(written: str) -> int:
        body = {"chunks": [f"{PASSAGE} {written}"]}
        answer = server.ask("PUT", f"{DOCUMENTS}/of/{written}", STORE, json=body).json()
        assert answer["computed"] == 1
        return int(answer["computed_tokens"])

    assert stored("<|im_end|>") == stored("<_im_end_>")


def test_no_message_is_an_error_of_the_server(honest: Served) -> None:
    """But for what vLLM answers to its own fields."""
    routes, draw, told = Routes(honest.schema), random.Random(0), Counter[int]()
    ours = {route: PLAIN.get(route) for route in routes if route[1].startswith("/v1/cacheblend")}
    for _ in range(CASES):
        sent = fuzzed(routes, ours, draw)
        answer = sent.to(honest.http, authorization=f"Bearer {STORE}")
        if answer is not None and (answer.status_code != 404 or answer.json() != NO_PATH):
            check(sent, answer)
            told[answer.status_code] += 1
    vllms = {route: body for route, body in PLAIN.items() if route not in ours}
    for _ in range(CASES):
        sent = fuzzed(routes, vllms, draw)
        if (answer := sent.to(honest.http, authorization=f"Bearer {ASK}")) is not None:
            told[answer.status_code] += 1
    assert min(told[200], told[400]) > CASES // 10


@pytest.mark.parametrize(("route", "field", "value"), giants())
def test_lists_and_maps_are_bounded(
    honest: Served, route: tuple[str, str], field: str, value: Any
) -> None:
    method, path = route
    body = {**PLAIN[route], field: value}
    answer = honest.ask(method, path.replace("{document_id}", "bad"), STORE, json=body)
    assert answer.status_code in {200, 400}
    assert len(answer.text) < 10_000


@pytest.mark.parametrize("what", HALVES)
def test_clients_that_hang_up_or_wait_hold_nobody_up(honest: Served, what: str) -> None:
    key = f"Authorization: Bearer {ASK}\r\n".encode()
    sent = HALVES[what].replace(b"\r\nContent", b"\r\n" + key + b"Content", 1)
    for _ in range(4):
        half(honest.port, sent).close()
    waiting = [half(honest.port, sent) for _ in range(4)]
    assert honest.answer("Who?", ASK)["choices"]
    for connection in waiting:
        connection.close()


# What our own client sends


def opened(
    url: str, server: Served, key: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Any:
    monkeypatch.setenv("CACHEBLEND_MODELS", str(server.folder / "models"))
    config = BlendConfig(min_tokens=0, cost_model=False, recompute_ratio=0.3)
    model = server.folder / "tiny.gguf"
    return open_engine(url, model=model, api_key=key, config=config, **options)


@pytest.fixture(scope="module")
def sent(server: Served) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of wishes and jobs, as our client sends them while it stores and asks."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Passing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if body and (self.path == JOBS or b"kv_transfer_params" in body):
                seen.append((self.path, json.loads(body)))
            left_out = {"host", "content-length", "connection", "accept-encoding"}
            headers = {n: v for n, v in self.headers.items() if n.lower() not in left_out}
            answer = httpx.request(
                self.command, server.url + self.path, content=body, headers=headers, timeout=120
            )
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", ""))
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with (
        ThreadingHTTPServer((HOST, 0), Passing) as passing,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        Thread(target=passing.serve_forever, daemon=True).start()
        url = f"http://{HOST}:{passing.server_port}"
        with closing(opened(url, server, STORE, monkeypatch)) as engine:
            assert STORE not in f"{engine} {engine!r}"
            chunk = Chunk(f"Our own. {PASSAGE.strip()}")
            engine.precompute([chunk, Document("d", (chunk.text, PASSAGE))], progress=False)
            prompt = BlendPrompt.of("Who? ", chunk, " And?")
            report = engine.generate(prompt, SamplingParams(max_tokens=2)).report
            assert [one.hit for one in report.chunks] == [True]
            engine.evict_document("d")
        passing.shutdown()
    return seen


def ask(server: Served, key: str, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return server.ask("POST", path, key, content=body, headers=headers)


def test_a_malformed_job_is_its_own_requests_concern(
    honest: Served, sent: list[tuple[str, dict[str, Any]]]
) -> None:
    draw, told = random.Random(1), Counter[tuple[str, int]]()
    for _ in range(CASES):
        path, body = draw.choice(sent)
        if path == JOBS:
            wrong = mutated(body, draw)
        else:
            wrong = {**body, "kv_transfer_params": mutated(body["kv_transfer_params"], draw)}
        answer = ask(honest, STORE, path, json.dumps(wrong).encode())
        told[path, answer.status_code] += 1
        assert "Traceback" not in answer.text
    assert {path for path, status in told if status == 200} == {JOBS, COMPLETIONS}, told
    assert told[JOBS, 400] > CASES // 8
    assert max(status for _, status in told) < 500, told


def hidden(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield a body as it is, and in ways that a reader might take for another."""
    plain = json.dumps(body)
    yield plain.encode()
    yield plain.encode("utf-8-sig")
    yield plain.encode("utf-16")
    yield plain.replace('"kind"', '"\\u006bind"').encode()
    yield plain.replace('"kind": "', '"kind": "status", "kind": "').encode()


def within(job: dict[str, Any]) -> Iterator[bytes]:
    """Yield completions that hold a job where vLLM, or an earlier version of ours, might look."""
    asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2, "temperature": 0.0}
    params = {"cacheblend": {"version": 5, **job}}
    for more in (
        {"kv_transfer_params": params},
        {"sampling_params": {"extra_args": {"kv_transfer_params": params}}},
        {"trace_headers": {"cacheblend-job": json.dumps(job)}},
    ):
        yield json.dumps({**asked, **more}).encode()


def test_who_may_ask_changes_nothing_however_it_is_said(
    server: Served, sent: list[tuple[str, dict[str, Any]]]
) -> None:
    """Nor does a tenant that may ask."""
    jobs = [body for path, body in sent if path == JOBS]
    changing = [one for one in jobs if ask(server, ASK, JOBS, json.dumps(one).encode()).is_error]
    assert 0 < len(changing) < len(jobs)

    def stored() -> int:
        return int(server.ask("GET", "/v1/cacheblend/stats", STORE).json()["stored_chunks"])

    before = stored()
    for body in changing:
        for key in (ASK, "acme asks"):
            for written in hidden(body):
                assert ask(server, key, JOBS, written).status_code in {400, 403}
            for written in within(body):
                answer = ask(server, key, COMPLETIONS, written)
                told = (answer.json().get("kv_transfer_params") or {}).get("cacheblend", {})
                assert answer.is_error or told.keys() <= {"reason"}, "no job was read"
    assert stored() == before


# What the page shows


SHOWN = {"curl": "curl -X PUT", "node": "storeDocument("}
"""What the example of a program holds."""


@pytest.mark.parametrize("program", SHOWN)
def test_the_pages_examples_run(server: Served, program: str) -> None:
    """Those of docs/server.md, as they stand there."""
    if which(program) is None:
        pytest.skip(f"{program} is not installed")
    (shown,) = [one.body for one in blocks(DOCS / "server.md") if SHOWN[program] in one.body]
    shown = shown.replace("http://127.0.0.1:8000", server.url)
    command = ["bash", "-c"] if program == "curl" else ["node", "--input-type=module", "-e"]
    environment = {**os.environ, "CACHEBLEND_STORE_KEY": "acme stores"}
    ended = subprocess.run(
        [*command, shown], check=False, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "manuals/pump.md" in ended.stdout
    assert "chunks" in ended.stdout
