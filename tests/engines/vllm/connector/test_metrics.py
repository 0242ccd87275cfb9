"""What is counted, by reason codes too, and how counts are added up and shown."""

from __future__ import annotations

import json
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig

from cacheblend_rag.engines.vllm.connector.metrics import BlendPromMetrics, BlendStats
from cacheblend_rag.engines.vllm.protocol.result import BlendResult, CompareResult, Failed
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport

HIT = ChunkReport("0" * 32, 3, 40, True, tier="host", recomputed=10)
MISS = ChunkReport("1" * 32, 43, 7, False, Miss.NOT_STORED)
DAMAGED = ChunkReport("2" * 32, 50, 7, False, Miss.DAMAGED)
TOO_FEW = BlendResult(
    Reason(ReasonCode.TOO_SHORT, "too few"),
    chunks=(MISS,),
    work_seconds=0.5,
    seconds={"look_up": 0.25},
)
FAILED = Failed(Reason(ReasonCode.FAILED, "blending failed: KeyError"))


def counted() -> BlendStats:
    stats = BlendStats()
    stats.record(
        BlendResult(
            chunks=(HIT, MISS),
            ratio=0.25,
            work_seconds=0.25,
            seconds={"look_up": 0.5, "load": 2.0, "load_hidden": 9.0},
            load_by_tier={"host": 0.5, "disk": 1.5},
        )
    )
    stats.record(TOO_FEW)
    stats.record(FAILED)
    stats.record(BlendResult(chunks=(DAMAGED,)))
    stats.record(CompareResult(0.5))
    stats.record(CompareResult(0.25, 0.1))
    stats.record_found(40, 0.25)
    stats.record_found(0, 0.5)
    return stats


def test_stats_add_up_and_start_anew_in_another_process_too() -> None:
    stats = BlendStats()
    assert stats.is_empty()
    stats.record(TOO_FEW)
    again = BlendStats(json.loads(json.dumps(stats.data)))
    both = again.aggregate(stats).reduce()
    assert (both["fallbacks"], both["fallbacks_too_short"]) == (2, 2)
    assert again.data["phase_seconds"] == {"look_up": [0.25, 0.25]}
    again.reset()
    assert again.is_empty()
    assert stats.reduce()["fallbacks"] == 1


def test_prometheus_counts_by_code_as_a_label() -> None:
    """As vLLM counts requests by their finished_reason: a label beside those of every metric."""
    registry = CollectorRegistry()
    metrics = BlendPromMetrics(
        VllmConfig(),
        {
            Counter: partial(Counter, registry=registry),
            Gauge: Gauge,
            Histogram: partial(Histogram, registry=registry),
        },
        ["model_name", "engine"],
        {0: ["smol", "0"]},
    )
    for _ in range(2):
        metrics.observe(counted().data)
    shown = generate_latest(registry).decode().splitlines()
    labels = 'engine="0",model_name="smol"'
    for line in (
        f'vllm:cacheblend_chunk_hits_total{{{labels},tier="host"}} 2.0',
        f'vllm:cacheblend_phase_seconds_sum{{{labels},phase="look_up"}} 1.5',
        f'vllm:cacheblend_phase_seconds_count{{{labels},phase="look_up"}} 4.0',
        "vllm:cacheblend_phase_seconds_bucket"
        '{engine="0",le="0.25",model_name="smol",phase="look_up"} 2.0',
        f'vllm:cacheblend_phase_seconds_sum{{{labels},phase="load"}} 4.0',
        f'vllm:cacheblend_load_seconds_sum{{{labels},tier="disk"}} 3.0',
        f"vllm:cacheblend_recompute_ratio_sum{{{labels}}} 0.5",
        f"vllm:cacheblend_reused_tokens_total{{{labels}}} 60.0",
        f"vllm:cacheblend_recomputed_tokens_total{{{labels}}} 20.0",
        f"vllm:cacheblend_blended_requests_total{{{labels}}} 2.0",
        f"vllm:cacheblend_found_tokens_total{{{labels}}} 80.0",
        f"vllm:cacheblend_guard_sample_divergence_count{{{labels}}} 4.0",
        f"vllm:cacheblend_guard_divergence_total{{{labels}}} 1.5",
        f'vllm:cacheblend_chunk_misses_total{{{labels},reason="not_stored"}} 4.0',
        f'vllm:cacheblend_chunk_misses_total{{{labels},reason="damaged"}} 2.0',
        f'vllm:cacheblend_fallbacks_total{{{labels},reason="too_short"}} 2.0',
        f'vllm:cacheblend_fallbacks_total{{{labels},reason="failed"}} 2.0',
        f'vllm:cacheblend_fallbacks_total{{{labels},reason="not_stored"}} 2.0',
    ):
        assert line in shown
    assert not any('phase="load_hidden"' in line for line in shown), "it is no part of a sum"
    codes = {line.partition('reason="')[2].partition('"')[0] for line in shown} - {""}
    assert codes <= set(ReasonCode), "never a sentence"
