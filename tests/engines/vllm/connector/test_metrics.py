"""What is counted, and how counts are added up."""

from __future__ import annotations

from cacheblend_rag.engines.vllm.connector.metrics import BlendStats
from cacheblend_rag.engines.vllm.protocol import BlendResult, Declined, Failed
from cacheblend_rag.report import ChunkReport


def test_a_result_is_counted_chunk_by_chunk() -> None:
    stats = BlendStats()
    hit = ChunkReport("0" * 32, 3, 40, True, tier="host", recomputed=10)
    miss = ChunkReport("1" * 32, 43, 7, False, "not stored")
    stats.record(BlendResult((hit, miss), work_seconds=0.25))
    stats.record(Declined("too few", (miss,), work_seconds=0.5))
    stats.record(Failed("blending failed: KeyError"))
    assert stats.reduce() == {
        "chunk_hits": 1,
        "chunk_misses": 2,
        "reused_tokens": 30,
        "recomputed_tokens": 10,
        "blended_requests": 1,
        "fallbacks": 2,
        "blend_seconds": 0.75,
    }


def test_stats_add_up_and_start_anew() -> None:
    stats = BlendStats()
    assert stats.is_empty()
    stats.record(Declined("no"))
    again = BlendStats(stats.to_dict())
    assert again.aggregate(stats).reduce()["fallbacks"] == 2
    again.reset()
    assert again.is_empty()
    assert stats.reduce()["fallbacks"] == 1
