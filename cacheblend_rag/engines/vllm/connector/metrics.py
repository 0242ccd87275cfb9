"""What blending did, for vLLM's metrics endpoint and for its log line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheblend_rag.engines.vllm.protocol import BlendResult, Declined, Result
from cacheblend_rag.report import reused_and_recomputed

PREFIX = "vllm:cacheblend_"
COUNTERS = {
    "chunk_hits": "Chunks of prompts whose stored KV was reused.",
    "chunk_misses": "Chunks of prompts whose KV was not stored, or not usable.",
    "reused_tokens": "Prompt tokens that kept their stored KV.",
    "recomputed_tokens": "Prompt tokens that had stored KV and were computed afresh.",
    "blended_requests": "Requests answered with stored KV.",
    "fallbacks": "Requests to be blended that ordinary prefill answered.",
    "blend_seconds": "Seconds of work on blended requests.",
}


class BlendStats(KVConnectorStats):
    """Counts since the last reading, by the names in COUNTERS."""

    def __init__(self, data: Mapping[str, float] | None = None) -> None:
        self.data: dict[str, float] = {**dict.fromkeys(COUNTERS, 0), **(data or {})}

    def record(self, result: Result) -> None:
        """Count what came of one request that was to be blended."""
        chunks = (result.chunks or ()) if isinstance(result, BlendResult | Declined) else ()
        seconds = getattr(result, "work_seconds", None) or 0.0
        hits = sum(chunk.hit for chunk in chunks)
        reused, recomputed = reused_and_recomputed(chunks)
        counted = {
            "chunk_hits": hits,
            "chunk_misses": len(chunks) - hits,
            "reused_tokens": reused,
            "recomputed_tokens": recomputed,
            "blended_requests": int(hits > 0),
            "fallbacks": int(hits == 0),
            "blend_seconds": seconds,
        }
        for name, value in counted.items():
            self.data[name] += value

    def reset(self) -> None:
        self.data = dict.fromkeys(COUNTERS, 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class BlendPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of COUNTERS and each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[Counter]
        self._counters = {
            name: kind(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(value)
