"""Filling on the embedded engine: the same KV, in turns that no request wants, in its namespace."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from cacheblend_rag import (
    BlendPrompt,
    Chunk,
    ChunkRegistry,
    Document,
    FillReport,
    SamplingParams,
    StoreConfig,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import until
from tests.models import prompt_of, words

SHORT = SamplingParams(max_tokens=2)
INSTRUCTION = words(4, 50)
PATIENCE = 60.0


@pytest.fixture
def make_filling(make_engine: EngineFactory) -> Iterator[EngineFactory]:
    """As make_engine, filling on miss; ended with the test."""
    made: list[TransformersEngine] = []

    def make(**arguments: object) -> TransformersEngine:
        made.append(make_engine(**arguments))
        made[-1].fill_on_miss = True
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asking(chunks: Sequence[Chunk], seed: int = 90) -> BlendPrompt:
    return prompt_of(words(5, seed), *(part for chunk in chunks for part in (chunk, "w7")), "w9")


def filled(engine: TransformersEngine, chunks: Sequence[Chunk]) -> list[ChunkKV]:
    """Miss chunks, and return their KV once it is there."""
    assert not engine.generate(asking(chunks), SHORT).report.blended
    assert until(lambda: not engine.fill_report().waiting, PATIENCE)
    return stored(engine, chunks)


def stored(engine: TransformersEngine, chunks: Sequence[Chunk]) -> list[ChunkKV]:
    found = [engine.store.get(engine.key(chunk)).kv for chunk in chunks]
    return [kv for kv in found if kv is not None]


@pytest.mark.parametrize("lead_in", ["none", "instruction", "document"])
def test_what_is_filled_is_what_precompute_stores(
    make_filling: EngineFactory, lead_in: str
) -> None:
    document = Document("d", tuple(words(12 + 3 * i, i) for i in range(4)), separator=" w77 ")
    chunks = [*document.to_chunks()[1:4:2], Chunk(words(30, 70))]
    one = make_filling(lead_in=lead_in, instruction=INSTRUCTION)
    one.register([document, chunks[2]])
    here = filled(one, chunks)
    other = make_filling(lead_in=lead_in, instruction=INSTRUCTION)
    other.precompute([document, chunks[2]], progress=False)
    there = stored(other, chunks)
    assert len(here) == len(there) == 3
    for mine, wanted in zip(here, there, strict=True):
        assert mine.position == wanted.position
        torch.testing.assert_close(mine.keys, wanted.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(mine.values, wanted.values, atol=1e-5, rtol=0)
    for mine, wanted in zip(here[:2], there[:2], strict=True):
        assert mine.prior is not None
        assert wanted.prior is not None
        torch.testing.assert_close(mine.prior, wanted.prior, atol=1e-4, rtol=1e-3)


def test_a_request_comes_between_the_layers_of_what_is_filled(make_filling: EngineFactory) -> None:
    """Its turn comes at once, and the filling goes on only when it has left the model alone."""
    engine, chunks = make_filling(), [Chunk(words(400, 3))]
    engine.register(chunks)
    turns: list[str] = []
    fill = engine._fill

    def watched(*given: Any) -> Iterator[Any]:
        for done in fill(*given):
            turns.append("fill")
            if len(turns) == 3:
                engine.generate(words(9, 1), SHORT)
                turns.append("request")
            yield done

    engine._fill = watched  # type: ignore[method-assign]
    engine.generate(asking(chunks), SHORT)
    assert until(lambda: engine.fill_report().computed == 1, PATIENCE)
    assert turns.index("request") == 3
    assert turns.count("fill") > engine.model.config.num_hidden_layers


def test_a_store_that_is_only_read_is_not_filled(
    make_filling: EngineFactory, tmp_path: Path
) -> None:
    TieredKVStore.of(StoreConfig(kv_path=tmp_path)).close()
    store = TieredKVStore.of(StoreConfig(kv_path=tmp_path, read_only=True))
    engine, chunk = make_filling(store=store), Chunk(words(40, 3))
    engine.registry.add_many([chunk])
    report = engine.generate(asking([chunk]), SHORT).report
    assert [told.reason for told in report.chunks] == ["not stored"]
    assert engine.fill_report() == FillReport()


def test_one_registry_of_two_engines_is_filled_by_each_for_itself(
    make_filling: EngineFactory,
) -> None:
    """What is stored for another instruction is missing all the same, and says why."""
    registry, store, chunk = ChunkRegistry(), TieredKVStore.open(), Chunk(words(40, 3))
    settings = {"registry": registry, "store": store, "lead_in": "instruction"}
    one = make_filling(instruction=INSTRUCTION, **settings)
    other = make_filling(instruction=words(6, 51), **settings)
    one.register([chunk])
    assert len(filled(one, [chunk])) == 1
    assert len(filled(other, [chunk])) == 1


def test_an_engine_that_is_dropped_is_let_go(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.fill_on_miss = True
    engine.register([chunk := Chunk(words(40, 3))])
    assert filled(engine, [chunk])
    gone = ref(engine)
    del engine
    gc.collect()
    assert until(lambda: gone() is None)
