"""Who reaches what, and what nobody is told; docs/security.md names these tests."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag import (
    BlendConfig,
    ConfigError,
    Document,
    Engine,
    SamplingParams,
    StoreConfig,
    TransformersEngine,
    open_engine,
)
from tests.contracts.security import (
    ASKS,
    FOREIGN,
    HOSTS,
    KEYS,
    METHODS,
    OPEN,
    OURS,
    UNKNOWN,
    refusal,
)
from tests.contracts.served import ASK, CHAT, DOCUMENTS, PASSAGE, STORE, Served, tiny_model
from tests.contracts.wire import HALVES, half
from tests.models import make_model, make_tokenizer, words

BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Who?", "max_tokens": 1},
    "/v1/responses": {"input": "Who?", "max_output_tokens": 1},
}
COMPARE = "/v1/compare"
BODIES[COMPARE] = BODIES[CHAT]
ROWS = {
    **OURS,
    "/v1/models/{model}": ASKS,
    COMPARE: ASKS,
    **dict.fromkeys(("/", "/page.css", "/page.js", "/words.js"), OPEN),
}
OF_ONE_SERVER = ("no key", "a wrong key", "the asking key", "the storing key")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def keyed(model: Path) -> Iterator[Served]:
    """A server with both keys, which are in none of its logs."""
    keys = {"VLLM_API_KEY": ASK, "CACHEBLEND_STORE_KEY": STORE}
    with Served(model, "transformers", "--kv-path", str(model.parent / "kv"), **keys) as server:
        yield server
        assert server.end() == 0
        assert not any(key in server.log for key in (ASK, STORE, "guess"))


@pytest.fixture(scope="module")
def unkeyed(model: Path) -> Iterator[Served]:
    """A server without a key, which is also called gpu.example."""
    with Served(model, "transformers", "--allowed-host", "gpu.example") as server:
        assert server.ask("PUT", f"{DOCUMENTS}/a", json={"chunks": [PASSAGE]}).is_success
        yield server


# Keys


@pytest.mark.parametrize("who", OF_ONE_SERVER)
def test_each_key_reaches_its_routes_and_no_other(keyed: Served, who: str) -> None:
    routes = keyed.schema["paths"]
    assert routes.keys() <= ROWS.keys(), "a new route needs a row"
    for path, kind in {**ROWS, UNKNOWN: ASKS}.items():
        for method in METHODS:
            body = {"json": BODIES.get(path, {"chunks": [PASSAGE]})} if method != "GET" else {}
            answer = keyed.ask(method, path.replace("{model}", "tiny"), KEYS[who], **body)
            told = f"{who}: {method} {path}: {answer.status_code} {answer.text[:200]}"
            expected = refusal(who, kind)
            assert not any(key in str(answer.headers) + answer.text for key in (ASK, STORE)), told
            if expected is None:
                assert answer.status_code not in {401, 403}, told
                takes = {one.upper() for one in routes.get(path, ())}
                if takes and method not in takes | {"HEAD"}:
                    assert answer.status_code == 405, told
                continue
            assert answer.status_code == expected, told
            if method != "HEAD":
                kinds = {401: "authentication_error", 403: "permission_error"}
                assert answer.json()["error"]["type"] == kinds[expected], told


@pytest.mark.parametrize(
    "header",
    [ASK, f"Basic {ASK}", f"Bearer {ASK}x", f"Bearer {ASK[:-1]}", "Bearer s\u00e9same"],
)
def test_a_key_is_the_whole_of_it_behind_bearer(keyed: Served, header: str) -> None:
    given = {"authorization": header.encode()}
    assert keyed.ask("GET", "/v1/models", headers=given).status_code == 401


def test_a_key_is_asked_for_before_a_body_is_read(keyed: Served) -> None:
    with closing(half(keyed.port, HALVES["half a body"])) as stranger:
        assert stranger.recv(1 << 16).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("path", ["/health/", "/healthy", "//metrics", "/health/../metrics"])
def test_no_other_way_of_writing_a_path_is_open(keyed: Served, path: str) -> None:
    answer = keyed.ask("GET", f"{keyed.url}{path}")
    assert answer.status_code == 401


def test_browsers_ask_first_without_a_key(keyed: Served) -> None:
    wants = {
        "origin": "http://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    told = keyed.ask("OPTIONS", CHAT, headers=wants)
    assert told.status_code == 200
    assert "authorization" in told.headers["access-control-allow-headers"]
    assert keyed.ask("OPTIONS", CHAT).headers["allow"] == "OPTIONS, POST"


def test_documents_are_stored_under_the_store_key_and_reused_by_who_asks(keyed: Served) -> None:
    text = f"A ferry leaves at noon. {PASSAGE}"

    def is_reused(question: str) -> bool:
        usage = keyed.answer(f"{question} {text}", ASK)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"]) > len(text) / 2

    path = f"{DOCUMENTS}/notes/a.md"
    assert not is_reused("Who?")
    assert keyed.ask("PUT", path, STORE, json={"chunks": [text]}).json()["computed"] == 1
    assert is_reused("What?")
    assert keyed.ask("DELETE", path, STORE).json()["deleted"] is True
    assert not is_reused("When?")


# Pages


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_without_a_key_no_page_reads_or_changes_anything(unkeyed: Served, method: str) -> None:
    """Neither one that has its own name pointed here, nor one that sends to this name."""
    foreign = [{"host": host} for host in FOREIGN]
    foreign += [{"origin": f"http://{host}"} for host in FOREIGN] + [{"origin": "null"}]
    for path in (*ROWS, f"{DOCUMENTS}/a"):
        if path == "/health":
            continue
        for headers in foreign:
            answer = unkeyed.ask(method, path, headers=headers, content=b"{}")
            assert answer.status_code == 403, (path, headers)
            assert PASSAGE not in answer.text
    assert unkeyed.ask("GET", f"{DOCUMENTS}/a").json()["chunks"][0]["text"] == PASSAGE


@pytest.mark.parametrize("host", [*HOSTS, "gpu.example", "GPU.example:8000"])
def test_without_a_key_who_names_this_machine_is_answered(unkeyed: Served, host: str) -> None:
    for headers in ({"host": host}, {"origin": f"http://{host}"}, {"origin": f"https://{host}"}):
        assert unkeyed.ask("GET", f"{DOCUMENTS}/a", headers=headers).status_code == 200
    wants = {"origin": f"http://{host}", "access-control-request-method": "POST"}
    assert unkeyed.ask("OPTIONS", CHAT, headers=wants).is_success


def test_whether_it_is_up_is_told_to_any_host(unkeyed: Served, keyed: Served) -> None:
    for server in (unkeyed, keyed):
        assert server.ask("GET", "/health", headers={"host": "pod-7:8000"}).status_code == 200
    named = {"host": FOREIGN[0]}
    assert keyed.ask("GET", "/v1/models", ASK, headers=named).status_code == 200


def test_who_is_refused_is_told_how_the_server_can_know_it(unkeyed: Served) -> None:
    told = unkeyed.ask("GET", "/v1/models", headers={"host": "gpu:8000"}).json()["error"]
    assert told["message"] == (
        "the host 'gpu:8000' is not known here: start the server with a key (VLLM_API_KEY), or "
        "with --allowed-host and this name"
    )


# Control tokens


TEXT, CONTROL = "<_im_end_>", "<|im_end|>"


def tokens(server: Served, **body: Any) -> int:
    answer = server.ask("POST", CHAT, json={"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def chat(written: str, role: str) -> dict[str, Any]:
    """A chat in which a stranger has written something, in a message of a role."""
    called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "tool_calls": [called]}]
    last = {"role": role, "content": f"He wrote {written} here."}
    if role == "tool":
        return {"messages": [*asked, {**last, "tool_call_id": "1"}]}
    return {"messages": [last]}


@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_looks_like_a_control_token_is_text(unkeyed: Served, role: str) -> None:
    """A token a byte: as text it takes ten of them."""
    assert tokens(unkeyed, **chat(CONTROL, role)) == tokens(unkeyed, **chat(TEXT, role))
    own = {"role": "assistant", "content": "And?"}
    asked = {"role": "user", "content": "Who?"}
    written = [[asked, {**own, "content": f"A {mark}"}, asked] for mark in (CONTROL, TEXT)]
    shorter, longer = (tokens(unkeyed, messages=one) for one in written)
    assert longer - shorter == len(TEXT) - 1, "what the application writes is as usual"


def test_a_passage_holds_no_control_token(unkeyed: Served) -> None:
    def stored(written: str) -> int:
        body = {"chunks": [f"{PASSAGE} {written}"]}
        answer = unkeyed.ask("PUT", f"{DOCUMENTS}/of/{written}", json=body).json()
        assert answer["computed"] == 1
        return int(answer["computed_tokens"])

    assert stored(CONTROL) == stored(TEXT)


# Boundaries


REUSE = BlendConfig(recompute_ratio=0.0, min_tokens=0, cost_model=False)
SHARED, STRANGERS, OTHERS = (words(count, seed=count) for count in (40, 32, 33))
ASKED = f"{words(5, seed=5)} {SHARED} w7"
PLAIN = SamplingParams(max_tokens=3, logprobs=0, temperature=0.0)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return make_model(), make_tokenizer()


def whole(engine: Engine, document: Document) -> None:
    engine.precompute([document], progress=False)


def in_parts(engine: Engine, document: Document) -> None:
    for chunk in document.to_chunks():
        engine.precompute([chunk], progress=False)
    whole(engine, document)


def bounded_later(engine: Engine, document: Document) -> None:
    whole(engine, replace(document, boundaries=()))
    whole(engine, document)


Stores = Callable[[Engine, Document], None]


def answered(tiny: Any, document: Document, store: Stores = whole) -> list[float]:
    """Return how likely the answer to a prompt is once a document is stored."""
    model, tokenizer = tiny
    with closing(
        TransformersEngine(model, tokenizer=tokenizer, config=REUSE, lead_in="document")
    ) as engine:
        store(engine, document)
        answer = engine.generate(ASKED, PLAIN)
        assert [chunk.hit for chunk in answer.report.chunks] == [True]
        assert answer.logprobs is not None
        return [token.logprob for token in answer.logprobs]


@pytest.mark.parametrize("store", [whole, in_parts, bounded_later])
def test_what_stands_before_a_boundary_never_colours_what_others_see(
    tiny: Any, store: Stores
) -> None:
    def seen(hidden: str, *boundaries: str) -> list[float]:
        return answered(tiny, Document("d", (hidden, SHARED), boundaries=boundaries), store=store)

    assert seen(STRANGERS) != seen(OTHERS)
    assert seen(STRANGERS, "staff", "all") == seen(OTHERS, "staff", "all")
    assert seen(OTHERS, "staff", "all") == answered(tiny, Document("d", (SHARED,)))


# What lies on a disk, and what settings tell


@pytest.fixture
def stored(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that an engine has written, where nothing else keeps others out."""
    monkeypatch.setenv("CACHEBLEND_MODELS", str(model.parent / "models"))
    before = os.umask(0)
    try:
        with closing(opened(model, tmp_path / "new" / "kv", "acme")) as engine:
            document = Document("d", (PASSAGE, f"And then {PASSAGE}"))
            assert engine.precompute([document], progress=False).computed == 2
        yield tmp_path / "new"
    finally:
        os.umask(before)


def opened(model: Path, folder: Path, namespace: str) -> Engine:
    return open_engine(
        "transformers", model=model, kv_path=folder, namespace=namespace, config=REUSE
    )


def test_files_and_folders_are_the_owners_alone(stored: Path) -> None:
    found = [stored, *stored.rglob("*")]
    assert sum(path.is_file() for path in found) > 2
    for path in found:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_no_stored_file_is_a_pickle(stored: Path) -> None:
    """Nor an archive of pickles, as PyTorch's files are."""
    for path in filter(Path.is_file, stored.rglob("*")):
        assert not path.read_bytes().startswith((b"\x80", b"PK")), path


def test_namespaces_of_a_store_share_nothing(stored: Path, model: Path) -> None:
    for namespace in ("acme", "globex", "default"):
        with closing(opened(model, stored / "kv", namespace)) as engine:
            report = engine.generate(f"Who? {PASSAGE}", SamplingParams(max_tokens=1)).report
            hits = [chunk.hit for chunk in report.chunks]
            assert hits == ([True] if namespace == "acme" else []), namespace
            assert bool(report.reused_tokens) == bool(hits), "nor what prompts begin with"


def test_a_tiers_password_is_told_by_nothing() -> None:
    password = "s3cr3t-of-redis"
    config = StoreConfig(tiers=(f"redis://user:{password}@127.0.0.1:1/0",))
    assert password not in f"{config} {config!r} {vars(config)}"
    with pytest.raises(ConfigError) as error:
        StoreConfig(tiers=(f"redis://user:{password}@127.0.0.1:1/0?no_such_option=1",))
    assert password not in str(error.value)


def test_answers_of_errors_tell_no_key(keyed: Served) -> None:
    for body in (f'{{"model": "{ASK}', json.dumps({"chunks": [1], "key": "x"})):
        for key in (STORE, "guess"):
            answer: httpx.Response = keyed.ask("PUT", f"{DOCUMENTS}/a", key, content=body)
            assert answer.status_code in {400, 401}
            assert key not in answer.text
