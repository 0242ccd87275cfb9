"""Loading a prompt's chunks: side by side, while others have the model, given up when cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cacheblend_rag import Chunk, Generation, SamplingParams, TieredKVStore
from cacheblend_rag.kv import HostTier
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import SlowTier, until
from tests.models import words

CHUNKS = [Chunk(words(20, seed)) for seed in range(8)]
TEXT = "\n".join([*(c.text for c in CHUNKS), words(6, 99)])
SHORT = SamplingParams(max_tokens=4)


class InBackground:
    """A call in a thread of its own, whose answer can be waited for."""

    def __init__(self, call: Callable[[], Generation]) -> None:
        self._answers: list[Generation] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(call()))
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Generation:
        self._thread.join(30)
        return self._answers[0]


@pytest.fixture
def slow() -> SlowTier:
    return SlowTier()


@pytest.fixture
def engine(make_engine: EngineFactory, slow: SlowTier) -> Iterator[Any]:
    """An engine whose chunks are all in the slow tier, and nowhere else."""
    engine = make_engine(store=TieredKVStore([HostTier(None), slow]), recompute_ratio=0.5)
    engine.precompute(CHUNKS, progress=False)
    for key in engine.store.entries():
        engine.store.tiers[0].evict(key)
    yield engine
    slow.gate = lambda: None
    engine.close()


def test_chunks_are_read_at_once_and_once_each(engine: Any, slow: SlowTier) -> None:
    full = engine.generate_full(TEXT, SHORT)
    everybody = threading.Barrier(len(CHUNKS), timeout=20)
    slow.gate = everybody.wait
    answer = engine.generate(TEXT, SHORT)
    assert [chunk.tier for chunk in answer.report.chunks] == ["slow"] * len(CHUNKS)
    assert slow.most_at_once == len(CHUNKS)
    assert len(slow.keys) == len(set(slow.keys)) == len(CHUNKS)
    assert answer.prompt_tokens == full.prompt_tokens
    again = engine.generate(TEXT, SHORT)
    assert [chunk.tier for chunk in again.report.chunks] == ["host"] * len(CHUNKS)
    assert again.token_ids == answer.token_ids
    assert again.report.reused_tokens == answer.report.reused_tokens


def test_a_cancelled_request_does_not_wait_for_its_reads(engine: Any, slow: SlowTier) -> None:
    go_on, cancel = threading.Event(), threading.Event()
    slow.gate = lambda: go_on.wait(30)
    waiting = InBackground(lambda: engine.generate(TEXT, SHORT, cancel=cancel))
    assert until(lambda: len(slow.keys) == len(CHUNKS))
    cancel.set()
    assert waiting.answer().finish_reason == "cancelled"
    assert not go_on.is_set()
    go_on.set()
    assert engine.generate(TEXT, SHORT).report.blended
