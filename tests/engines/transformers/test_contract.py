"""The embedded engine keeps the contract of all engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import PreTrainedModel

from cacheblend_rag import TransformersEngine
from tests.engines.contract import CONFIG, EngineContract
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
        with engine._turns.taken():
            yield
