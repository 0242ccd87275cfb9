"""Chunks precomputed by one engine are found by the other: in a folder, in Redis and in S3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, StoreConfig, TieredKVStore, TransformersEngine
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.exactness import SHORT, difference, logprobs
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS, retrieved
from tests.kv.samples import until
from tests.local_servers import Server
from tests.models import make_tokenizer
from tests.servers import redis_place, s3_place, tier_at

REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0, cost_model=False)


@dataclass(frozen=True)
class Pair:
    """Two engines, each with a process of its own, on one store. places: its tiers' URLs."""

    engines: tuple[VLLMEngine, VLLMEngine]
    places: dict[str, str]

    def keep_in(self, name: str | None) -> None:
        """Leave chunks in one tier only, or nowhere."""
        for tier in map(tier_at, (url for other, url in self.places.items() if other != name)):
            for key, _ in list(tier.entries()):
                tier.evict(key)


@pytest.fixture(scope="module")
def pair(
    open_vllm: EngineFactory, redis: Server, s3: Server, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    places = {
        "disk": f"disk://{tmp_path_factory.mktemp('kv')}?promote=no",
        "redis": redis_place(redis, "promote=no"),
        "s3": s3_place(s3, "promote=no"),
    }
    settings = ConnectorSettings(store=StoreConfig(tiers=list(places.values())))
    one, other = (open_vllm(settings=settings, config=REUSE) for _ in range(2))
    return Pair((one, other), places)


@pytest.fixture(params=["disk", "redis", "s3"])
def tier(request: pytest.FixtureRequest, pair: Pair) -> str:
    """The only tier that has chunks: each engine has stored one of the two documents there."""
    pair.keep_in(None)
    for engine, document in zip(pair.engines, DOCUMENTS, strict=True):
        engine.register(DOCUMENTS)
        assert engine.precompute([document], progress=False).computed == 2
    name: str = request.param
    pair.keep_in(name)
    return name


def test_both_engines_use_one_store(pair: Pair, model_folder: Callable[[str], Path]) -> None:
    pair.keep_in(None)
    vllm, _ = pair.engines
    embedded = TransformersEngine(
        model_folder("llama"),
        tokenizer=make_tokenizer(),
        config=REUSE,
        store=TieredKVStore.of(StoreConfig(tiers=[pair.places["disk"]])),
    )
    assert embedded.precompute(DOCUMENTS[:1], progress=False).computed == 2
    assert vllm.precompute(DOCUMENTS[:1], progress=False).skipped == 2
    assert vllm.precompute(DOCUMENTS[1:], progress=False).computed == 2
    assert embedded.precompute(DOCUMENTS[1:], progress=False).skipped == 2

    question = retrieved(seed=21)
    here, there = (engine.generate(question, SHORT) for engine in (vllm, embedded))
    assert here.token_ids == there.token_ids
    assert [chunk.hit for chunk in here.report.chunks] == [True] * 3
    assert [chunk.hit for chunk in there.report.chunks] == [True] * 3


def test_two_workers_blend_what_either_stored(pair: Pair, tier: str) -> None:
    said, question = [], retrieved(opening=60 + list(pair.places).index(tier))
    for engine in pair.engines:
        assert engine.precompute(DOCUMENTS, progress=False).skipped == 4
        answer = engine.generate(question, SHORT)
        assert [chunk.tier for chunk in answer.report.chunks] == [tier] * 3
        said.append(logprobs(engine, request_of(engine, question, SHORT, REUSE)))
        assert difference(engine, question, 0.0) > 1e-4, "what is reused is what was stored"
        assert difference(engine, question, 1.0) == 0.0
    assert said[0] == said[1]


def test_what_one_worker_forgets_the_other_misses(pair: Pair, tier: str) -> None:
    one, other = pair.engines
    opening = 70 + 2 * list(pair.places).index(tier)
    one.evict_document(DOCUMENTS[1].document_id)
    answer = other.generate(retrieved(opening=opening), SHORT)
    assert [chunk.hit for chunk in answer.report.chunks] == [False, True, True]
    assert other.precompute(DOCUMENTS, progress=False).computed == 2

    def found() -> bool:
        answer = one.generate(retrieved(opening=opening + 1), SHORT)
        return [chunk.hit for chunk in answer.report.chunks] == [True] * 3

    assert until(found, 20), "what another process stores is found a moment later"
