"""The embedded engine loads or computes by what it has measured, and says which and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.kv import DiskTier, codec
from cacheblend_rag.kv.timings import LEAST
from cacheblend_rag.prefill import policy
from cacheblend_rag.prefill.policy import MARGIN
from tests.engines.contract import check_prefilled_instead
from tests.engines.transformers.conftest import EngineFactory
from tests.models import prompt_of, words

CHUNKS = [Chunk(words(60, 3)), Chunk(words(50, 4))]
PROMPT = prompt_of(words(5, 1), *CHUNKS, words(9, 5))
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def _ranges_of_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small a chunk would be read at once, and tests/conftest.py lets nothing be given up."""
    monkeypatch.setattr(DiskTier, "whole_bytes", 0)
    monkeypatch.setattr(codec, "HEAD_BYTES", 1024)
    monkeypatch.setattr(policy, "MARGIN", MARGIN)


def test_a_tier_that_is_slower_than_prefill_is_not_waited_for(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MARGIN", 100.0)  # the passes of so small a model are slow
    engine = make_engine(store=TieredKVStore([DiskTier(tmp_path)]), recompute_ratio=0.2)
    engine.precompute(CHUNKS, progress=False)
    for _ in range(LEAST):
        plain = engine.generate_full(PROMPT, SHORT)
        first = engine.generate(PROMPT, SHORT).report
        assert (first.blended, first.ratio_reason) == (True, None)
    for _ in range(30):  # a share of a second more than was measured
        engine.store.speeds.record("disk", 1000, 50.0)
    slow = engine.generate(PROMPT, SHORT)
    check_prefilled_instead(slow, plain, ["disk", "disk"])
    for _ in range(60):
        engine.store.speeds.record("disk", 1 << 30, 1e-6)
    assert engine.generate(PROMPT, SHORT).report.blended
