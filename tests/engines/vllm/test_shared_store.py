"""Chunks precomputed by one engine are found by the other: in a folder, in Redis and in S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, StoreConfig, TieredKVStore, TransformersEngine
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.opening import request_of
from tests.engines.vllm.test_exactness import DOCUMENTS, SHORT, difference, logprobs, retrieved
from tests.models import make_tokenizer
from tests.servers import redis_place, s3_place

PLACES = {"redis": redis_place, "s3": s3_place}
REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0)


def test_both_engines_use_one_store(
    open_vllm: EngineFactory, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ConnectorSettings(store=StoreConfig(kv_path=tmp_path))
    vllm = open_vllm(settings=settings, config=REUSE)
    embedded = TransformersEngine(
        model_folder("llama"),
        tokenizer=make_tokenizer(),
        config=REUSE,
        store=TieredKVStore.open(host_bytes=0, kv_path=tmp_path),
    )
    assert embedded.precompute(DOCUMENTS[:1], progress=False).computed == 2
    assert vllm.precompute(DOCUMENTS[:1], progress=False).skipped == 2
    assert vllm.precompute(DOCUMENTS[1:], progress=False).computed == 2
    assert embedded.precompute(DOCUMENTS[1:], progress=False).skipped == 2

    here, there = (engine.generate(retrieved(), SHORT) for engine in (vllm, embedded))
    assert here.token_ids == there.token_ids
    assert [chunk.hit for chunk in here.report.chunks] == [True] * 3
    assert [chunk.hit for chunk in there.report.chunks] == [True] * 3


@pytest.fixture(scope="module", params=sorted(PLACES))
def pair(
    request: pytest.FixtureRequest, open_vllm: EngineFactory
) -> Iterator[tuple[str, VLLMEngine, VLLMEngine]]:
    """Two engines, each with a process of its own, on one store of a real server and no other."""
    url = PLACES[request.param](request.getfixturevalue(request.param))
    settings = ConnectorSettings(store=StoreConfig(tiers=[url]))
    one, other = (open_vllm(settings=settings, config=REUSE) for _ in range(2))
    assert one.precompute(DOCUMENTS[:1], progress=False).computed == 2
    assert other.precompute(DOCUMENTS[1:], progress=False).computed == 2
    yield request.param, one, other
    one.close()
    other.close()


def test_two_workers_blend_what_either_stored(pair: tuple[str, VLLMEngine, VLLMEngine]) -> None:
    tier, *engines = pair
    said = []
    for engine in engines:
        assert engine.precompute(DOCUMENTS, progress=False).skipped == 4
        answer = engine.generate(retrieved(), SHORT)
        assert [chunk.tier for chunk in answer.report.chunks] == [tier] * 3
        said.append(logprobs(engine, request_of(engine, retrieved(), SHORT, REUSE)))
        assert difference(engine, retrieved(), 0.0) > 1e-4, "what is reused is what was stored"
        assert difference(engine, retrieved(), 1.0) == 0.0
    assert said[0] == said[1]


def test_what_one_worker_forgets_the_other_misses(
    pair: tuple[str, VLLMEngine, VLLMEngine],
) -> None:
    _, one, other = pair
    one.evict_document(DOCUMENTS[1].document_id)
    answer = other.generate(retrieved(seed=10), SHORT)
    assert [chunk.hit for chunk in answer.report.chunks] == [False, True, True]
    assert other.precompute(DOCUMENTS, progress=False).computed == 2
    answer = one.generate(retrieved(seed=11), SHORT)
    assert [chunk.hit for chunk in answer.report.chunks] == [True] * 3
