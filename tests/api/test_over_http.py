"""An engine over a server of the embedded engine keeps the contract of all engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedModel

from cacheblend_rag import BlendConfig, Conversation, Engine, TransformersEngine, open_engine
from cacheblend_rag.api.app import create_app
from tests.contracts.engine import (
    CONFIG,
    EmbeddedContract,
    counting,
    embedded_model,
    tokenizer_with_template,
    wait_until,
)
from tests.engines.conversations import PASSAGES, QUESTIONS, SAMPLING
from tests.local_servers import HOST, free_port


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return embedded_model()


@pytest.fixture(scope="module")
def calls(model: PreTrainedModel) -> Iterator[list[int]]:
    with counting(model) as calls:
        yield calls


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Run an application in a thread; yields its URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://{HOST}:{port}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def on_server(
    model: PreTrainedModel, calls: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine over a server of the embedded engine; it knows the tokenizer by a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_with_template().save_pretrained(folder)
    with (
        closing(
            TransformersEngine(model, tokenizer=tokenizer_with_template(), config=CONFIG)
        ) as served,
        listening(create_app(served)) as url,
        closing(open_engine(url, model=folder, config=CONFIG)) as engine,
    ):
        yield engine


class TestOverHTTP(EmbeddedContract):
    @pytest.fixture
    def engine(self, on_server: Engine) -> Engine:
        return on_server


def test_conversations_are_kept_on_the_server(model: PreTrainedModel, tmp_path: Path) -> None:
    tokenizer_with_template().save_pretrained(tmp_path)
    config = BlendConfig(min_tokens=0, cost_model=False)
    served = TransformersEngine(model, tokenizer=tokenizer_with_template(), config=config)
    with (
        closing(served),
        listening(create_app(served)) as url,
        closing(open_engine(url, model=tmp_path, config=config)) as engine,
    ):
        engine.precompute(PASSAGES, progress=False)
        conversation = Conversation(engine, sampling=SAMPLING)
        for turn in range(3):
            conversation.ask(QUESTIONS[turn], PASSAGES[2 * turn : 2 * turn + 2])
            wait_until(lambda: not conversation.kv._fillings)
        assert conversation.last is not None
        assert conversation.last.turn_tokens >= 2 * 24
        assert engine.name == "transformers-server"
        assert conversation.forget() > 0
