"""Filling on the embedded engine: the same KV, in turns that no request wants, in its namespace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from cacheblend_rag import (
    BlendPrompt,
    Chunk,
    Document,
    SamplingParams,
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
