"""Counters of blending for vLLM's metrics endpoint and its log line."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheblend_rag.engines.vllm.protocol import (
    BlendResult,
    CompareResult,
    Declined,
    Failed,
    Result,
)
from cacheblend_rag.prefill.policy import NOT_STORED
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import reused_and_recomputed

PREFIX = "vllm:cacheblend_"
COUNTERS = {
    "chunk_hits": "Chunks of prompts whose stored KV was reused.",
    "reused_tokens": "Prompt tokens that kept their stored KV.",
    "recomputed_tokens": "Prompt tokens that had stored KV and were computed afresh.",
    "blended_requests": "Requests answered with stored KV.",
    "blend_seconds": "Seconds of work on blended requests.",
    "guard_samples": "Blended answers that were compared with full prefill.",
    "guard_divergence": "Sum of their divergences from it, in nats per token.",
}
COUNTERS_BY_REASON = {
    "chunk_misses": "Chunks of prompts whose KV was not stored, or not usable, by reason code.",
    "fallbacks": "Requests to be blended that ordinary prefill answered, by reason code.",
}
REASON_LABEL = "reason"


class BlendStats(KVConnectorStats):
    """Counts since the last reading, by the names in COUNTERS and COUNTERS_BY_REASON.

    Those by reason have one count per code.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.reset()
        for name, value in (data or {}).items():
            _add(self.data, name, value)

    def record(self, result: Result) -> None:
        """Count the result of one request with a blend job, or of one comparison."""
        if isinstance(result, CompareResult):
            _add(self.data, "guard_samples", 1)
            _add(self.data, "guard_divergence", result.divergence)
            return
        chunks = (result.chunks or ()) if isinstance(result, BlendResult | Declined) else ()
        seconds = getattr(result, "work_seconds", None) or 0.0
        hits = sum(chunk.hit for chunk in chunks)
        reused, recomputed = reused_and_recomputed(chunks)
        counted = {
            "chunk_hits": hits,
            "reused_tokens": reused,
            "recomputed_tokens": recomputed,
            "blended_requests": int(hits > 0),
            "blend_seconds": seconds,
            "chunk_misses": CountOf(chunk.reason_code for chunk in chunks if not chunk.hit),
            "fallbacks": {} if hits else {_fallback_code(result): 1},
        }
        for name, value in counted.items():
            _add(self.data, name, value)

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, Any] = {
            **dict.fromkeys(COUNTERS, 0),
            **{name: {} for name in COUNTERS_BY_REASON},
        }

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another part has counted."""
        for name, value in other.data.items():
            _add(self.data, name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of vLLM's log line: sums, then the counts by code."""
        told: dict[str, int | float] = {name: round(self.data[name], 3) for name in COUNTERS}
        for name in COUNTERS_BY_REASON:
            told[name] = sum(self.data[name].values())
            told |= {f"{name}_{code}": count for code, count in self.data[name].items()}
        return told

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


def _add(data: dict[str, Any], name: str, value: Any) -> None:
    """Add to the count of a name, or to its counts by code."""
    if name not in COUNTERS_BY_REASON:
        data[name] += value
        return
    counts = data[name]
    for code, count in value.items():
        counts[str(code)] = counts.get(str(code), 0) + count


def _fallback_code(result: Result) -> ReasonCode:
    """Return the code of why ordinary prefill answered instead of a blend."""
    match result:
        case Failed(error=why) | Declined(reason=why):
            return why.code
        case _:
            return NOT_STORED.code


class BlendPromMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each of COUNTERS and COUNTERS_BY_REASON, of each engine.

    The latter have the label ``reason``, whose values are codes (ReasonCode).
    """

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
        self._counters_by_reason = {
            name: kind(
                name=PREFIX + name, documentation=text, labelnames=[*labelnames, REASON_LABEL]
            )
            for name, text in COUNTERS_BY_REASON.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data.get(name, 0))
        for name, counter in self._counters_by_reason.items():
            for code, count in transfer_stats_data.get(name, {}).items():
                counter.labels(*labels, code).inc(count)
