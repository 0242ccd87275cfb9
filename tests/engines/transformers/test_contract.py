"""The embedded engine keeps the contract of all engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
from transformers import PreTrainedModel

from cacheblend_rag import TransformersEngine
from tests.engines.contract import CONFIG, PATIENCE, SHORT, EngineContract
from tests.models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """As everywhere, but for a window that is filled in a moment."""
    model = make_model("llama")
    model.config.max_position_embeddings = 2048
    return model


class TestTransformersEngine(EngineContract):
    @pytest.fixture
    def engine(self, model: PreTrainedModel) -> Iterator[TransformersEngine]:
        engine = TransformersEngine(model, tokenizer=make_tokenizer(), config=CONFIG)
        yield engine
        engine.close()

    @contextmanager
    def busy(self, engine: TransformersEngine) -> Iterator[None]:
        """Let a request stand still within the model."""
        begun, go_on = Event(), Event()

        def wait(*_: object) -> None:
            begun.set()
            go_on.wait(PATIENCE)

        hook = engine.model.get_input_embeddings().register_forward_pre_hook(wait)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(engine.generate, "w7 w8 w9", SHORT)
            try:
                assert begun.wait(PATIENCE)
                yield
            finally:
                go_on.set()
                hook.remove()
                answer.result()
