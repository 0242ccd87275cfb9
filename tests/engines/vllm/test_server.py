"""The bundled model behind a real server: what only a server can do, or go wrong with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import openai
import pytest
from typer.testing import CliRunner

from cacheblend_rag import (
    BlendConfig,
    Document,
    PrecomputeReport,
    SamplingParams,
    StoreConfig,
    TransformersEngine,
    open_engine,
)
from cacheblend_rag.cli.main import app
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.protocol import job
from cacheblend_rag.engines.vllm.protocol.status import NO_CONNECTOR
from cacheblend_rag.engines.vllm.serve import RunningServer, reserved_port
from cacheblend_rag.errors import CacheBlendError, ConfigError, EngineUnavailableError
from tests.engines.forms_contract import FormsContract
from tests.engines.vllm.any_client import FLAGS, LEAST, AnyClient
from tests.engines.vllm.conftest import ServerFactory
from tests.engines.vllm.demo_prompts import HEAD, documents, text
from tests.models import words
from tests.readme import blocks
from tests.toy import INSTRUCTION, TOY, DemoPrompt, generate_prompts
from tests.unmodified_clients import UnmodifiedClients

KEY, STORE_KEY = "sesame", "barley"
NAMESPACE = "tenant"
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.15, cost_model=False)
REUSE = CONFIG.with_changes(recompute_ratio=0.0)
ANSWER = SamplingParams(max_tokens=12)
PROMPTS: tuple[DemoPrompt, ...] = tuple(generate_prompts("adjacent", 4, 11))


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    assert KEY not in str(error)
    assert STORE_KEY not in str(error)
    return str(error)


@pytest.fixture(scope="module")
def kv_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


Start = Callable[[int], RunningServer]


@pytest.fixture(scope="module")
def start(start_server: ServerFactory, kv_path: Path) -> Start:
    """Start the server on a port; it keeps KV on disk only, and asks for keys."""

    def start_at(port: int) -> RunningServer:
        return start_server(
            TOY,
            *FLAGS,
            served_name="toy",
            port=port,
            settings=ConnectorSettings(
                unconfirmed_context=True,
                store=StoreConfig(kv_path=kv_path, host_bytes=0),
                namespace=NAMESPACE,
            ),
            environment={"VLLM_API_KEY": KEY, "CACHEBLEND_STORE_KEY": STORE_KEY},
        )

    return start_at


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[RunningServer]:
    with reserved_port() as port:
        yield start(port)


@pytest.fixture(scope="module")
def engine(server: RunningServer) -> Iterator[VLLMEngine]:
    opened = open_engine(
        f"{server.url}/v1",
        model=TOY,
        api_key=STORE_KEY,
        namespace=NAMESPACE,
        config=CONFIG,
        instruction=HEAD,
    )
    assert isinstance(opened, VLLMEngine)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def indexed(engine: VLLMEngine) -> PrecomputeReport:
    return engine.precompute(documents(*PROMPTS), progress=False)


def test_it_says_what_it_is(engine: VLLMEngine, server: RunningServer) -> None:
    assert (engine.name, engine.model_name, engine.address) == ("vllm-server", "toy", server.url)
    assert engine.context_window == 4096
    assert engine.has_chat_template
    assert KEY not in repr(engine)
    assert (engine.status.active, engine.status.wire) == (True, job.VERSION)


class TestForms(FormsContract):
    @pytest.fixture
    def engine(self, engine: VLLMEngine) -> VLLMEngine:
        return engine


def test_the_readmes_program_asks_it(server: RunningServer) -> None:
    """As it stands but for the address, model, key and namespace of the server that is here."""
    (program,) = [block for block in blocks("python") if "http://" in block]
    there = program.replace("http://127.0.0.1:8000", server.url)
    there = there.replace('model="smollm2"', f'model="{TOY}", namespace="{NAMESPACE}"')
    assert NAMESPACE in there
    environment = {**os.environ, "CACHEBLEND_API_KEY": KEY}
    run = [sys.executable, "-c", there]
    assert subprocess.run(run, env=environment, check=True, capture_output=True).stdout.strip()


def test_answers_are_the_embedded_engines_and_right(
    engine: VLLMEngine, indexed: PrecomputeReport
) -> None:
    assert indexed.refused == {}
    embedded = TransformersEngine(TOY, config=CONFIG, instruction=HEAD, dtype="float32")
    embedded.precompute(documents(*PROMPTS), progress=False)
    answers = engine.generate_batch([text(prompt) for prompt in PROMPTS], ANSWER)
    right = [a.text.strip() == p.question.answer for p, a in zip(PROMPTS, answers, strict=True)]
    assert sum(right) >= 3
    for prompt, here in zip(PROMPTS, answers, strict=True):
        there = embedded.generate(text(prompt), ANSWER)
        assert (here.text.strip(), here.token_ids) == (there.text.strip(), there.token_ids)
        assert here.finish_reason == there.finish_reason == "stop"
        assert here.report.blended
        assert {chunk.tier for chunk in here.report.chunks} == {"disk"}
        assert here.report.recomputed_tokens == there.report.recomputed_tokens > 0


def test_a_stream_brings_its_report(engine: VLLMEngine, indexed: PrecomputeReport) -> None:
    [*_, last] = engine.stream(text(PROMPTS[1]), ANSWER, config=REUSE)
    assert last.generation is not None
    report = last.generation.report
    assert report.blended
    assert report.reused_tokens == sum(chunk.tokens for chunk in report.chunks)
    assert report.seconds.load > 0


def test_chat_messages_are_rendered_here(engine: VLLMEngine, indexed: PrecomputeReport) -> None:
    body = text(PROMPTS[0]).removeprefix(HEAD)
    answer = engine.generate([{"role": "user", "content": f"{INSTRUCTION}\n\n{body}"}], ANSWER)
    assert len(answer.report.chunks) == len(PROMPTS[0].chunk_texts)


def send(
    server: RunningServer, path: str, body: bytes | None = None, *, key: str | None = None
) -> tuple[int, bytes]:
    """Return the status of what the server answers, and what it says."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(f"{server.url}{path}", body, headers)) as response:  # noqa: S310
            return response.status, response.read()
    except HTTPError as error:
        return error.code, error.read()


def metrics(server: RunningServer, name: str) -> list[float]:
    """The values of all metrics with ``name`` in theirs."""
    lines = send(server, "/metrics", key=KEY)[1].decode().splitlines()
    return [float(line.split()[-1]) for line in lines if name in line and not line.startswith("#")]


def test_leaving_a_stream_ends_it_at_the_server(engine: VLLMEngine, server: RunningServer) -> None:
    stream = engine.stream(words(30, 1), SamplingParams(max_tokens=3900, ignore_eos=True))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 30
    while any(metrics(server, "num_requests_running{")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metrics(server, "num_requests_running{") == [0]


def test_metrics_show_what_blending_did(
    engine: VLLMEngine, server: RunningServer, indexed: PrecomputeReport
) -> None:
    def counted(name: str) -> float:
        return sum(metrics(server, f"vllm:cacheblend_{name}_total{{"))

    before = {name: counted(name) for name in ("chunk_hits", "reused_tokens", "recomputed_tokens")}
    config = CONFIG.with_changes(recompute_ratio=0.25)
    report = engine.generate(text(PROMPTS[2]), ANSWER, config=config).report
    deadline = time.monotonic() + 30
    while counted("chunk_hits") == before["chunk_hits"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: counted(name) - value for name, value in before.items()} == {
        "chunk_hits": len(report.chunks),
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
    }
    assert counted("blend_seconds") > 0


@pytest.mark.parametrize("key", ["wrong", None])
def test_a_wrong_key_is_one_line(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.delenv("CACHEBLEND_API_KEY", raising=False)
    with pytest.raises(EngineUnavailableError, match="refuses the API key") as caught:
        open_engine(server.url, model=TOY, api_key=key)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("depth", "why"),
    [(65, b"deeper than 64"), (500, b"deeper than 64"), (100_000, b"more than 65536 values")],
)
def test_a_deep_body_is_refused_and_hurts_nobody(
    server: RunningServer, depth: int, why: bytes
) -> None:
    nested = "[" * depth + "]" * depth
    body = f'{{"model": TOY, "prompt": [5], "kv_transfer_params": {{"cacheblend": {nested}}}}}'
    status, said = send(server, "/v1/completions", body.encode(), key=KEY)
    assert (status, why in said) == (400, True)
    assert send(server, "/v1/models", key=KEY)[0] == 200


def test_a_long_body_is_refused(server: RunningServer) -> None:
    assert send(server, "/v1/completions", b" " * (17 << 20), key=KEY)[0] == 413


def test_who_may_ask_may_not_store(server: RunningServer, indexed: PrecomputeReport) -> None:
    asking = open_engine(
        server.url, model=TOY, api_key=KEY, namespace=NAMESPACE, config=REUSE, instruction=HEAD
    )
    needed = "the key in the server's CACHEBLEND_STORE_KEY is needed"
    with pytest.raises(EngineUnavailableError, match=f"to precompute, {needed}") as caught:
        asking.precompute(["Something new to everyone."], progress=False)
    one_line(caught.value)
    asking.register(documents(*PROMPTS))
    [document] = PROMPTS[3].documents[:1]
    with pytest.raises(EngineUnavailableError, match=f"to evict, {needed}"):
        asking.evict_document(document.document_id)
    report = asking.generate(text(PROMPTS[3]), ANSWER).report
    assert report.blended
    assert all(chunk.hit for chunk in report.chunks), "what was stored, it may ask about"
    asking.close()


def test_memory_is_released_by_a_route_and_by_an_engine(
    server: RunningServer, engine: VLLMEngine, indexed: PrecomputeReport
) -> None:
    """Who may only ask may not; what is on disk, which is all here, stays."""

    def post(key: str) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{server.url}/v1/cacheblend/release", headers=headers, timeout=60)
        return answer.status_code, answer.json()

    status, told = post(KEY)
    assert status == 403
    assert "to release, the key" in told["error"]["message"]
    assert post("guess")[0] == 401
    assert post(STORE_KEY) == (200, {"released_bytes": 0})
    assert engine.release() == 0
    assert engine.generate(text(PROMPTS[2]), ANSWER, config=REUSE).report.blended
    asking = open_engine(server.url, model=TOY, api_key=KEY, namespace=NAMESPACE)
    with pytest.raises(EngineUnavailableError, match="to release, the key"):
        asking.release()
    asking.close()


class TestAnyClient(AnyClient):
    key = KEY


class TestUnmodifiedClients(UnmodifiedClients):
    key = KEY

    @pytest.fixture
    def url(self, server: RunningServer) -> str:
        return server.url

    @pytest.fixture
    def passage(self, engine: VLLMEngine) -> str:
        text = words(200, 900)
        assert engine.precompute([Document("read by others", (text,))], progress=False).failed == {}
        return text


def test_what_does_not_fit_the_server_is_refused(
    server: RunningServer, model_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match="namespace='default' is not the server's") as caught:
        open_engine(server.url, model=TOY, api_key=KEY)
    one_line(caught.value)
    with pytest.raises(ConfigError, match="tokenizer here is not that of model 'toy'"):
        open_engine(server.url, model=model_folder("llama"), api_key=KEY, namespace=NAMESPACE)


def test_doctor_says_that_it_blends(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_API_KEY", KEY)
    found = doctor(server.url, "--model", TOY)
    assert (found["problem"], found["blending"], found["model"]) == (None, True, "toy")
    assert found["versions"]["vllm"].startswith("0.")
    assert found["store"].keys() == {"chunks", "bytes"}
    own = doctor(server.url, "--namespace", NAMESPACE)["connector"]
    assert own["namespace"] == NAMESPACE
    other = doctor(server.url, "--namespace", "another")["connector"]
    assert "not 'another' but another, " in other["namespace"]


def doctor(url: str, *options: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["doctor", "--url", url, "--json", *options])
    assert done.exit_code == code, done.stderr
    return dict(json.loads(done.stdout))


def test_a_server_without_the_connector_answers_and_says_so(start_server: ServerFactory) -> None:
    server = start_server(TOY, served_name="toy", connector=False)
    engine = open_engine(server.url, config=CONFIG, model="", instruction=HEAD)
    assert engine.precompute(documents(PROMPTS[0]), progress=False).refused == {
        NO_CONNECTOR: len(PROMPTS[0].chunk_texts)
    }
    [*_, last] = engine.stream(text(PROMPTS[0]), ANSWER)
    assert last.generation is not None
    for answer in (engine.generate(text(PROMPTS[0]), ANSWER), last.generation):
        assert answer.text.strip()
        assert (answer.report.blended, answer.report.reason) == (False, NO_CONNECTOR)
    assert engine.evict_document("any") == 0
    engine.close()
    found = doctor(server.url, code=1)
    assert (found["blending"], found["problem"]) == (False, NO_CONNECTOR)
    server.stop()


def answers_begun(server: RunningServer) -> int:
    """How many completions the server has begun to answer, by its log."""
    return server.log.read_text(errors="replace").count("POST /v1/completions")


def test_a_killed_server_is_an_error_and_its_successor_has_its_chunks(
    engine: VLLMEngine, server: RunningServer, start: Start, indexed: PrecomputeReport
) -> None:
    """Last: it ends the module's server."""
    raised: list[CacheBlendError] = []

    def read() -> None:
        try:
            list(engine.stream(words(30, 1), SamplingParams(max_tokens=3900, ignore_eos=True)))
        except CacheBlendError as error:
            raised.append(error)

    before = answers_begun(server)
    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive() and answers_begun(server) == before:
        time.sleep(0.01)  # not for a piece: vLLM may send a small model's pieces all at the end
    server.stop(at_once=True)
    assert server.process.returncode == -signal.SIGKILL
    reader.join(60)
    [error] = raised
    assert isinstance(error, EngineUnavailableError)
    assert server.url in one_line(error)
    with pytest.raises(EngineUnavailableError, match="no server answers there") as caught:
        engine.generate(text(PROMPTS[0]), ANSWER)
    one_line(caught.value)

    start(int(server.url.rpartition(":")[2]))
    again = engine.precompute(documents(*PROMPTS), progress=False)
    assert (again.computed, again.refused) == (0, {})
    assert again.skipped == indexed.computed + indexed.skipped
    answer = engine.generate(text(PROMPTS[0]), ANSWER)
    assert {chunk.tier for chunk in answer.report.chunks} == {"disk"}
    assert answer.text.strip() == PROMPTS[0].question.answer
    found = TestAnyClient()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        assert found.cached(found.chat(client)) > LEAST, "its file tells what is stored"
