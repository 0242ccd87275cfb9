"""Two ranks: each holds half of the heads, and they choose the same rows as one rank would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from cacheblend_rag import BlendConfig, Generation, StoreConfig
from cacheblend_rag.engines.vllm.connector.metadata import StepResults
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.protocol.result import (
    RANK_FAILED,
    BlendResult,
    Failed,
    PrecomputeResult,
)
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.reason import Reason, ReasonCode
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.exactness import SHORT, difference, logprobs
from tests.engines.vllm.failing import GIVEN_UP_BY, TOLD, WEIGHED, FailingConnector
from tests.engines.vllm.opening import request_of, share_cores
from tests.engines.vllm.shared import shared_engine
from tests.families.reference import DOCUMENTS, retrieved
from tests.servers import tier_at

SELECTORS = ("hkvd", "prior", "question_mid")
ENDS_WITHIN_SECONDS = 120.0
"""vLLM would wait 300 seconds for a rank; on two busy cores ending the engine alone takes 20."""
BY_SHARE = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)

Answers = dict[str, tuple[Generation, list[float]]]


@dataclass(frozen=True)
class TwoRanks:
    """An engine over two ranks. place: of their one tier, a URL. fails: makes the second fail."""

    engine: VLLMEngine
    place: str
    fails: Path


@pytest.fixture(scope="module")
def of_one_rank(model_folder: Callable[[str], Path]) -> Answers:
    """What one rank answers, by selector; it is closed before others are forked from here."""
    with shared_engine("llama", model_folder("llama"), BY_SHARE) as engine:
        engine.precompute(DOCUMENTS, progress=False)
        return {selector: answered(engine, selector) for selector in SELECTORS}


@pytest.fixture(scope="module")
def two_ranks(
    open_vllm: EngineFactory, tmp_path_factory: pytest.TempPathFactory, of_one_rank: Answers
) -> Iterator[TwoRanks]:
    """Ranks that share a folder."""
    folder = tmp_path_factory.mktemp("ranks")
    place = f"disk://{folder / 'kv'}"
    transfer = ConnectorSettings(store=StoreConfig(tiers=[place])).to_transfer_config()
    transfer["kv_connector"] = FailingConnector.__name__
    transfer["kv_connector_module_path"] = FailingConnector.__module__
    with pytest.MonkeyPatch.context() as patch:
        share_cores(patch)
        patch.setenv(TOLD, str(folder / "fail"))
        engine = open_vllm(
            tensor_parallel_size=2, config=BY_SHARE, kv_transfer_config=KVTransferConfig(**transfer)
        )
    engine.precompute(DOCUMENTS, progress=False)
    yield TwoRanks(engine, place, folder / "fail")
    if engine.is_open:
        engine.close()


def rows(generation: Generation) -> list[tuple[bool, int]]:
    return [(chunk.hit, chunk.recomputed) for chunk in generation.report.chunks]


def answered(engine: Any, selector: str) -> tuple[Generation, list[float]]:
    config = BY_SHARE.with_changes(selector=selector)
    generation = engine.generate(retrieved(), SHORT, config=config)
    return generation, logprobs(engine, request_of(engine, retrieved(), SHORT, config))


@pytest.mark.parametrize("selector", SELECTORS)
def test_two_ranks_choose_the_rows_of_one(
    two_ranks: TwoRanks, of_one_rank: Answers, selector: str
) -> None:
    there, said_there = answered(two_ranks.engine, selector)
    here, said_here = of_one_rank[selector]
    assert sum(count for _, count in rows(here)) > 0
    assert rows(there) == rows(here)
    assert there.token_ids == here.token_ids
    assert there.report.compute_share == pytest.approx(here.report.compute_share, rel=0.02)
    # Other rows would show here: plain reuse is off by more than 1.
    assert said_there == pytest.approx(said_here, abs=1e-4)


def test_ratio_1_is_ordinary_prefill(two_ranks: TwoRanks) -> None:
    engine = two_ranks.engine
    assert difference(engine, retrieved(), 1.0) == 0.0
    assert difference(engine, retrieved(), 0.0) > 1e-4


def test_a_chunk_that_one_rank_lost_is_a_miss_on_both(two_ranks: TwoRanks) -> None:
    engine, tier = two_ranks.engine, tier_at(two_ranks.place)
    chunks = engine.generate(retrieved(opening=64), SHORT).report.chunks
    assert [chunk.tier for chunk in chunks] == [tier.name] * 3
    own = engine.key(DOCUMENTS[0].to_chunks()[0]).chunk_id
    parts = [key for key, _ in tier.entries() if key.chunk_id == own]
    assert len(parts) == 2, "each rank stores its half"
    assert tier.evict(parts[1])
    report = engine.generate(retrieved(opening=65), SHORT).report
    assert [c.hit for c in report.chunks] == [True, False, True]
    again = engine.precompute(DOCUMENTS, progress=False)
    assert (again.computed, again.skipped) == (1, 3)
    assert tier.contains(parts[1])
    report = engine.generate(retrieved(opening=66), SHORT).report
    assert [c.hit for c in report.chunks] == [True] * 3


def test_the_first_rank_weighs_for_all(two_ranks: TwoRanks) -> None:
    engine = two_ranks.engine
    prompt, plain = retrieved(seed=41), engine.generate_full(retrieved(seed=41), SHORT)
    first, second = (
        engine.generate(prompt, SHORT, config=BY_SHARE.with_ratio(ratio))
        for ratio in GIVEN_UP_BY.values()
    )
    assert first.report.reason == WEIGHED
    assert first.report.reason_code is WEIGHED.code
    assert [chunk.reason for chunk in first.report.chunks] == ["slow"] * 3
    assert first.token_ids == plain.token_ids
    assert second.report.blended


def test_a_rank_that_fails_in_a_layer_does_not_leave_the_others_waiting(
    two_ranks: TwoRanks,
) -> None:
    """Last: it ends the engine."""
    engine = two_ranks.engine
    assert engine.generate(retrieved(opening=62), SHORT).report.blended
    two_ranks.fails.touch()
    started = time.monotonic()
    with pytest.raises(EngineUnavailableError, match="has ended"):
        engine.generate(retrieved(opening=63), SHORT)
    assert time.monotonic() - started < ENDS_WITHIN_SECONDS


def test_an_error_of_any_rank_is_the_result() -> None:
    fine, failed = BlendResult(), Failed(Reason(ReasonCode.FAILED, "blending failed: OSError"))
    late = replace(RANK_FAILED, work_seconds=0.1)
    for first, second in ((failed, late), (late, failed)):
        results = StepResults({"a": first}).aggregate(StepResults({"a": second}))
        assert results.results == {"a": failed}
    results = StepResults({"a": fine, "b": PrecomputeResult(3), "c": PrecomputeResult(3)})
    other = StepResults({"a": replace(fine), "b": PrecomputeResult(2), "c": failed})
    assert results.aggregate(other).results == {"a": fine, "b": PrecomputeResult(2), "c": failed}
