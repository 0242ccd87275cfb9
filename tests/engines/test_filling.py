"""Filling on miss by itself: what waits for it, what is dropped, and how it ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from threading import Event

import pytest

from cacheblend_rag import Chunk, Document
from cacheblend_rag.engines import filling, lifetime
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.report import PrecomputeReport
from tests.contracts.engine import REUSE, SHORT
from tests.engines.toy_engine import ToyEngine
from tests.kv.samples import until
from tests.models import make_tokenizer, prompt_of, words

PATIENCE = 60.0


class FilledEngine(ToyEngine):
    """Notes the keys that it fills, in order, and waits at a gate before, which is open at first.

    begun, ended: whether filling ever was at the gate, or is through.
    """

    def __init__(self) -> None:
        self.filled: list[KVKey] = []
        self.begun, self.gate, self.ended = Event(), Event(), Event()
        self.gate.set()
        super().__init__(make_tokenizer(), config=REUSE, fill_on_miss=True)

    def _fill(self, plans: Sequence[ChunkPlan]) -> Generator[PrecomputeReport]:
        self.filled += [plan.key for plan in plans]
        self.begun.set()
        try:
            while not self.gate.wait(0.01):
                yield PrecomputeReport()
            yield from super()._fill(plans)
        finally:
            self.ended.set()

    def ask(self, *chunks: Chunk) -> list[str | None]:
        """Ask about chunks; returns why each was missed."""
        prompt = prompt_of("w5", *(part for chunk in chunks for part in (chunk, "w7")), "w9")
        return [told.reason for told in self.generate(prompt, SHORT).report.chunks]

    def hold(self, chunk: Chunk) -> None:
        """Miss a chunk, and let its filling wait at the gate."""
        self.gate.clear()
        self.ask(chunk)
        assert self.begun.wait(PATIENCE)

    def settle(self) -> None:
        """Let all that waits be filled."""
        self.gate.set()
        assert until(lambda: not self.fill_report().waiting, PATIENCE)


@pytest.fixture
def engine() -> Iterator[FilledEngine]:
    engine = FilledEngine()
    yield engine
    engine.gate.set()
    engine.close()


@pytest.fixture
def chunks(engine: FilledEngine) -> list[Chunk]:
    """Chunks that are registered and not stored."""
    chunks = [Chunk(words(20 + seed, seed)) for seed in range(6)]
    engine.register(chunks)
    return chunks


def test_what_is_evicted_meanwhile_is_not_filled(engine: FilledEngine) -> None:
    """Neither what waits for its turn nor what is being computed."""
    at_work, waiting = (Document(name, (words(30, seed),)) for seed, name in enumerate("ab", 30))
    engine.register([at_work, waiting])
    engine.hold(at_work.to_chunks()[0])
    engine.ask(*waiting.to_chunks())
    for document in (at_work, waiting):
        assert engine.evict_document(document.document_id) == 0
    engine.settle()
    assert engine.filled == [engine.key(at_work.to_chunks()[0])]
    engine.fill_on_miss = False
    engine.register([at_work, waiting])
    assert engine.ask(*at_work.to_chunks(), *waiting.to_chunks()) == ["not stored"] * 2


def test_too_many_misses_are_dropped_and_counted(
    engine: FilledEngine, chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "IdleJob", partial(lifetime.IdleJob, most=2))
    engine.hold(chunks[0])
    told = [
        engine.ask(*chunks[one]) for one in (slice(1, 2), slice(1, 3), slice(1, 2), slice(3, 6))
    ]
    healing = "not stored, being filled"
    assert told == [[healing], [healing] * 2, [healing], ["not stored"] * 3]
    engine.settle()
    report = engine.fill_report()
    assert (report.computed, report.dropped) == (3, 3)
    assert engine.filled == [engine.key(chunk) for chunk in chunks[:3]], "in their order"
