"""The bundled model behind a real server: what only a server can do, or go wrong with."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from typer.testing import CliRunner

from cacheblend_rag import (
    BlendConfig,
    PrecomputeReport,
    SamplingParams,
    StoreConfig,
    open_engine,
)
from cacheblend_rag.cli.main import app
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.errors import CacheBlendError, EngineUnavailableError
from tests.engines.vllm.conftest import ServerFactory
from tests.kv.samples import until
from tests.local_servers import free_port
from tests.models import words
from tests.toy import TOY, DemoPrompt, generate_prompts
from tests.toy.corpus import HEAD, documents, text
from tests.unmodified_clients import UnmodifiedClients
from tests.vllm_server import RunningServer

KEY, STORE_KEY = "sesame", "barley"
NAMESPACE = "tenant"
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.15, cost_model=False)
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
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
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
def server(start: Start) -> RunningServer:
    return start(free_port())


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


def store(engine: VLLMEngine, *texts: str) -> None:
    """Store texts; the server finds them a moment later."""
    assert engine.precompute(texts, progress=False).refused == {}
    asked = SamplingParams(max_tokens=1)
    assert until(lambda: any(c.hit for c in engine.generate(texts[-1], asked).report.chunks), 60)


# Clients that know nothing of chunks


TEXTS = [words(110, 700 + i) for i in range(8)]
LEAST = 100
"""Tokens that every request here reuses at least: its texts have several hundred."""
numbers = count()


@pytest.fixture(scope="module")
def client(server: RunningServer, engine: VLLMEngine) -> Iterator[openai.OpenAI]:
    store(engine, *TEXTS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def prompt_of_texts(number: int) -> str:
    """Several known texts, in an order that no other number has, and a question."""
    chosen = [TEXTS[(number + i * 3) % len(TEXTS)] for i in range(3)]
    listed = "\n\n".join(f"[{i}] {text}" for i, text in enumerate(chosen))
    return f"Asked {number}.\n\n{listed}\n\nWho is {words(3, number)}?"


def chat(client: openai.OpenAI, number: int, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt_of_texts(number)}]
    return client.chat.completions.create(
        model="toy", messages=messages, temperature=0, max_tokens=4, **options
    )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_every_route_reuses_texts(client: openai.OpenAI, server: RunningServer) -> None:
    prompts = map(prompt_of_texts, numbers)
    both = [next(prompts), next(prompts)]
    completed = client.completions.create(model="toy", prompt=both, max_tokens=2)
    assert len(completed.choices) == 2
    assert cached(completed) > LEAST
    told = client.responses.create(model="toy", input=next(prompts), max_output_tokens=16)
    assert told.usage is not None
    assert told.usage.input_tokens_details.cached_tokens > LEAST
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as other:
        asked: Any = [{"role": "user", "content": next(prompts)}]
        answer = other.messages.create(model="toy", max_tokens=4, messages=asked)
    assert (answer.usage.cache_read_input_tokens or 0) > LEAST
    echoed = client.completions.create(
        model="toy", prompt=next(prompts), max_tokens=2, echo=True, logprobs=1
    )
    assert cached(echoed) == 0, "its log-probabilities are the prompt's own"


@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_that_is_too_long_has_openais_code(client: openai.OpenAI, streams: bool) -> None:
    long: list[Any] = [{"role": "user", "content": "w1 " * 9000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as told:
        client.chat.completions.create(model="toy", messages=long, stream=streams)
    assert told.value.code == "context_length_exceeded"


class TestUnmodifiedClients(UnmodifiedClients):
    key = KEY

    @pytest.fixture
    def url(self, server: RunningServer) -> str:
        return server.url

    @pytest.fixture
    def passage(self, engine: VLLMEngine) -> str:
        text = words(200, 900)
        store(engine, text)
        return text


def test_doctor_says_that_it_blends(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_API_KEY", KEY)
    found = doctor(server.url, TOY)
    assert (found["problem"], found["blending"], found["model"]) == (None, True, "toy")
    assert found["versions"]["vllm"].startswith("0.")
    assert found["store"].keys() == {"chunks", "bytes"}
    own = doctor(server.url, "--set", f"namespace={NAMESPACE}")["connector"]
    assert own["namespace"] == NAMESPACE
    other = doctor(server.url, "--set", "namespace=another")["connector"]
    assert "not 'another' but another, " in other["namespace"]


def doctor(url: str, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["doctor", "--url", url, "--json", *options])
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


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
    os.killpg(server.process.pid, signal.SIGKILL)
    assert server.process.wait() == -signal.SIGKILL
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
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        assert cached(chat(client, next(numbers))) > LEAST, "its file tells what is stored"
