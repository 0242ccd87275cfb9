"""Engines on vLLM keep the contract of all engines, whichever way they reach it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.http import VLLMServer
from cacheblend_rag.engines.vllm.in_process import InProcessVLLM
from cacheblend_rag.engines.vllm.serve import running_server
from tests.engines.contract import CONFIG, EngineContract
from tests.engines.vllm.conftest import SERVER_FLAGS

WINDOW = 2048


@pytest.fixture(scope="module")
def in_process(model_folder: Callable[[str], Path]) -> Iterator[VLLMEngine]:
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": WINDOW}
    engine = VLLMEngine(InProcessVLLM(model_folder("llama"), **options), config=CONFIG)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def on_server(model_folder: Callable[[str], Path]) -> Iterator[VLLMEngine]:
    folder = model_folder("llama")
    flags = (*SERVER_FLAGS, "--max-model-len", str(WINDOW))
    with running_server(folder, flags=flags) as server:
        engine = VLLMEngine(VLLMServer(server.url, model=folder), config=CONFIG)
        yield engine
        engine.close()


class TestInProcess(EngineContract):
    tells_what_it_stores = False

    @pytest.fixture
    def engine(self, in_process: VLLMEngine) -> VLLMEngine:
        return in_process

    def at_work(self, engine: VLLMEngine) -> int:
        assert isinstance(engine.transport, InProcessVLLM)
        return int(engine.transport._vllm.output_processor.get_num_unfinished_requests())


class TestServer(EngineContract):
    tells_what_it_stores = False

    @pytest.fixture
    def engine(self, on_server: VLLMEngine) -> VLLMEngine:
        return on_server

    def at_work(self, engine: VLLMEngine) -> int:
        # vLLM sets its gauges at the end of a step; a request that is aborted between two steps is
        # counted until the next one, so there has to be one.
        step = json.dumps({"prompt": [0], "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{engine.address}/v1/completions", step, headers)) as answer:  # noqa: S310
            answer.read()
        with urlopen(f"{engine.address}/metrics") as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return int(sum(float(line.split()[-1]) for line in running))
