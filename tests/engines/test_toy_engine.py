"""A third engine keeps the whole contract, and costs little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from cacheblend_rag import Generation, SamplingParams
from cacheblend_rag.engines.answer import Request
from tests.engines.contract import CONFIG, WAYS, EngineContract
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer


class TestToyEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[ToyEngine]:
        engine = ToyEngine(make_tokenizer(), config=CONFIG)
        yield engine
        engine.close()


def test_an_engine_that_is_dropped_frees_its_memory_at_once() -> None:
    """Neither it nor a sibling is in a circle that waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        engine = ToyEngine(make_tokenizer(), config=CONFIG)
        sibling = engine.sibling(lead_in="bos")
        for one in (engine, sibling):
            one.precompute(["w2 w3 w4"], progress=False)
            one.generate("w2 w3 w4 w5", SamplingParams(max_tokens=2))
        registry, gone = engine.registry, [ref(engine), ref(sibling)]
        del engine, sibling, one
        assert [found() for found in gone] == [None, None]
        assert len(registry) == 1, "a registry outlives engines"
    finally:
        gc.enable()


def test_a_hook_that_fails_harms_nobody_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, seen = ToyEngine(make_tokenizer()), list[Generation]()

    def broken(request: Request, answer: Generation) -> Generation:
        raise RuntimeError("the hook broke")

    engine.after_answer(broken)
    engine.after_answer(lambda request, answer: seen.append(answer))  # type: ignore[arg-type, return-value]
    answers = [way(engine, "w4 w5 w6") for way in WAYS.values()]
    assert [answer.finish_reason for answer in answers] == ["length"] * len(answers)
    assert seen == answers
    assert caplog.text.count("RuntimeError: the hook broke") == 1
    assert caplog.text.count("broken") > 0, "the hook is named"
    engine.close()
