"""A third engine keeps the whole contract, and costs little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import toy_engine
from tests.engines.contract import CONFIG, EngineContract
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer

MOST_LINES = 120


class TestToyEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[ToyEngine]:
        engine = ToyEngine(make_tokenizer(), config=CONFIG)
        yield engine
        engine.close()


def test_a_third_engine_is_short() -> None:
    assert len(Path(toy_engine.__file__).read_text().splitlines()) < MOST_LINES
