"""vLLM keeps the contract of all engines, on a server and in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client import REGISTRY

from cacheblend_rag import Engine, TransformersEngine, open_engine
from tests.contracts.engine import (
    CONFIG,
    LIKELY,
    REUSE,
    WINDOW,
    EngineContract,
    Texts,
    distance,
    tokenizer_with_template,
)
from tests.local_servers import HOST, free_port
from tests.models import save_model

START_SECONDS = 400
TOKENS = "vllm:generation_tokens_total"
OFF = {"cacheblend": {"version": 5, "kind": "off"}}
"""With which a request says that its prompt is not to be searched."""
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, whose window is WINDOW."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_model("llama", folder, head_dim=64)
    tokenizer_with_template().save_pretrained(folder)
    config = folder / "config.json"
    told = json.loads(config.read_text()) | {"max_position_embeddings": WINDOW}
    config.write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Where a server of the model answers."""
    port = free_port()
    command = [sys.executable, "-m", "cacheblend_rag", "serve", str(folder), "--engine", "vllm"]
    flags = ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    url = f"http://{HOST}:{port}"
    environment = {**ENVIRONMENT, **os.environ}
    with subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL, env=environment) as server:
        try:
            end = time.monotonic() + START_SECONDS
            while not _is_ready(url):
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health"):  # noqa: S310
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def on_server(url: str, folder: Path) -> Iterator[Engine]:
    engine = open_engine(url, model=folder, config=CONFIG)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def in_process(folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        environment.setenv("VLLM_CPU_CI_ENV", "1")  # no compiler, which takes a minute
        engine = open_engine("vllm", model=folder, dtype="float32", config=CONFIG)
    yield engine
    engine.close()


class TestServer(EngineContract):
    @pytest.fixture
    def engine(self, on_server: Engine) -> Engine:
        return on_server

    def steps(self, engine: Engine) -> int:
        with urlopen(f"{engine.address}/metrics") as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(TOKENS)))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_answers_are_the_embedded_engines(
    url: str, folder: Path, request: pytest.FixtureRequest, ratio: float
) -> None:
    texts, config = Texts(request.node.name), CONFIG.with_changes(recompute_ratio=ratio)
    document = texts.document(60, 50, 40)
    prompt = texts.asking(*document.to_chunks()[::-1])
    answers = []
    for engine in (
        open_engine(url, model=folder, config=config),
        TransformersEngine(folder, config=config, dtype="float32"),
    ):
        engine.precompute([document], progress=False)
        answers.append(engine.generate(prompt, LIKELY))
        engine.close()
    here, there = answers
    assert distance(here, there) < 1e-3
    assert here.report.blended
    assert here.report.recomputed_tokens == there.report.recomputed_tokens


def test_plain_requests_never_see_blended_blocks(
    url: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Neither those of the prompt that was blended just before."""
    texts = Texts(request.node.name)
    document = texts.document(150, 140, 130)
    engine = open_engine(url, model=folder, config=CONFIG)
    engine.precompute([document], progress=False)
    prompt = texts.asking(*document.to_chunks()[::-1])
    blended = engine.generate(prompt, LIKELY, config=REUSE.with_changes(reuse_prefix=True))
    asked = {"prompt": prompt.text, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    sent = json.dumps({**asked, "kv_transfer_params": OFF}).encode()
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", sent, headers)) as answer:  # noqa: S310
        (plain,) = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
    full = engine.generate_full(prompt, LIKELY)
    engine.close()
    assert distance(blended, full) > 1e-3
    assert full.logprobs is not None
    assert plain == pytest.approx(full.logprobs[0].logprob, abs=1e-4)


class TestInProcess(EngineContract):
    """Last, since it has a vLLM of its own."""

    @pytest.fixture
    def engine(self, in_process: Engine) -> Engine:
        return in_process

    def steps(self, engine: Engine) -> int:
        told = (one for metric in REGISTRY.collect() for one in metric.samples)
        return int(sum(one.value for one in told if one.name == TOKENS))
