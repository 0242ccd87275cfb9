"""A request asks the store once for each chunk, and reads no layer where it will not blend."""

from __future__ import annotations

import pytest

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.kv import codec
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import CountingTier, SlowBytes
from tests.models import prompt_of, words

CHUNKS = [Chunk(words(20, seed)) for seed in range(11)]
PROMPT = prompt_of(*CHUNKS, words(6, 99))
SHORT = SamplingParams(max_tokens=2)


@pytest.fixture
def tiers(make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Memory that is empty, before a tier that has all chunks, in ranges."""
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 10)
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    near, far = CountingTier(), SlowBytes()
    far.fill({key: engine.store.get(key).kv for key in engine.store.keys()})  # noqa: SIM118
    return near, far


@pytest.mark.parametrize("stored", [11, 7, 0])
def test_a_request_looks_each_chunk_up_once(
    make_engine: EngineFactory, tiers: tuple, stored: int
) -> None:
    near, far = tiers
    for key in list(far.objects)[stored:]:
        del far.objects[key]
    with TieredKVStore([near, far], ttl_seconds=3600.0) as store:
        engine = make_engine(store=store, reuse_prefix=False)
        engine.register(CHUNKS)
        report = engine.generate(PROMPT, SHORT).report
        assert sum(chunk.hit for chunk in report.chunks) == stored
        assert len(near.lookups) == len(set(near.lookups)) == len(CHUNKS)
        assert len(far.opened) == len(set(far.opened)) == len(CHUNKS)
        assert far.looked_up == []
        assert bool(far.ranges) == bool(stored)


def test_a_prompt_that_is_too_short_reads_heads_alone(
    make_engine: EngineFactory, tiers: tuple
) -> None:
    near, far = tiers
    with TieredKVStore([near, far]) as store:
        engine = make_engine(store=store, min_tokens=221, reuse_prefix=False)
        engine.register(CHUNKS)
        few = engine.generate(PROMPT, SHORT).report
        assert few.reason == "220 reusable tokens are fewer than min_tokens=221"
        assert {chunk.reason for chunk in few.chunks} == {"too short"}
        assert (len(far.opened), far.looked_up, far.ranges) == (len(CHUNKS), [], [])
        enough = engine.generate(PROMPT, SHORT, config=engine.config.with_changes(min_tokens=220))
        assert enough.report.blended
