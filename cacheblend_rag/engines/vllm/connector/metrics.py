"""Counters and histograms of blending for vLLM's metrics endpoint and its log line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheblend_rag.engines.metric_names import COUNTERS, HISTOGRAMS, NATS, Metric
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    CompareResult,
    Failed,
    Result,
)
from cacheblend_rag.prefill.policy import NOT_STORED
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import PREFILL_PHASES, count_chunks, reused_and_recomputed

PREFIX = "vllm:cacheblend_"
METRICS: Mapping[str, Metric] = {
    **COUNTERS,
    "blend_seconds": Metric("Seconds of work on blended requests."),
    "found_requests": Metric("Requests in whose prompts the server itself found stored chunks."),
    "found_tokens": Metric("Tokens of the chunks that it found."),
    "find_seconds": Metric("Seconds that the scheduler has searched prompts for chunks."),
    **HISTOGRAMS,
    "guard_sample_divergence": Metric(
        "Divergence of blended answers from full prefill, in nats per token.", None, NATS
    ),
}
"""Counters, and with buckets histograms, by their names without PREFIX."""
KEPT = 1024
"""Most observations kept per histogram and label value until vLLM collects them."""
UNLABELLED = ""
"""The label value of metrics without a label."""


class BlendStats(KVConnectorStats):
    """Counter increments and histogram observations since vLLM last collected them.

    data: for each of METRICS, by the value of its label, a counter's count or a histogram's list of
    values.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.reset()
        self._add(data or {})

    def record(self, result: Result) -> None:
        """Count the result of one request with a blend job, or of one comparison."""
        if isinstance(result, CompareResult):
            divergence = result.divergence
            self._count(guard_samples=1, guard_divergence=divergence)
            self._add({"guard_sample_divergence": {UNLABELLED: [divergence]}})
            return
        chunks = result.chunks if isinstance(result, BlendResult) else ()
        hits, misses = count_chunks(chunks)
        reused, recomputed = reused_and_recomputed(chunks)
        self._count(
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            blended_requests=int(bool(hits)),
            blend_seconds=getattr(result, "work_seconds", None) or 0.0,
        )
        self._add(
            {
                "chunk_hits": hits,
                "chunk_misses": misses,
                "fallbacks": {} if hits else {_fallback_code(result): 1},
                **_values(result, blended=bool(hits)),
            }
        )

    def record_found(self, tokens: int, seconds: float) -> None:
        """Count a prompt that was searched for chunks.

        tokens: of the chunks in it, 0 if nothing is to be reused. seconds: of searching.
        """
        self._count(found_requests=int(tokens > 0), found_tokens=tokens, find_seconds=seconds)

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, dict[str, Any]] = {
            name: {} if metric.label or metric.buckets else {UNLABELLED: 0}
            for name, metric in METRICS.items()
        }

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another part has counted."""
        self._add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of vLLM's log line: sums, then the counts by label."""
        told: dict[str, int | float] = {}
        for name, metric in METRICS.items():
            if metric.buckets:
                continue
            counts = self.data[name]
            told[name] = round(sum(counts.values()), 3)
            if metric.label:
                told |= {f"{name}_{value}": count for value, count in counts.items()}
        return told

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(value for by_label in self.data.values() for value in by_label.values())

    def _count(self, **counts: float) -> None:
        """Add to counters without a label."""
        self._add({name: {UNLABELLED: count} for name, count in counts.items()})

    def _add(self, data: Mapping[str, Mapping[str, Any]]) -> None:
        for name, by_label in data.items():
            held = self.data[name]
            for label, value in by_label.items():
                if METRICS[name].buckets:
                    kept = held.setdefault(label, [])
                    kept += value[: KEPT - len(kept)]
                else:
                    held[str(label)] = held.get(str(label), 0) + value


def _values(result: Result, *, blended: bool) -> dict[str, dict[str, list[float]]]:
    """Return the values of histograms that a result adds."""
    if not isinstance(result, BlendResult):
        return {}
    seconds = result.seconds
    told = {"phase_seconds": {name: [seconds[name]] for name in PREFILL_PHASES if name in seconds}}
    if blended:
        told["load_seconds"] = {tier: [spent] for tier, spent in result.load_by_tier.items()}
        told["recompute_ratio"] = {UNLABELLED: [result.ratio]}
    return told


def _fallback_code(result: Result) -> ReasonCode:
    """Return the code of why ordinary prefill answered instead of a blend."""
    match result:
        case Failed(error=why) | BlendResult(reason=why) if why:
            return why.code
        case _:
            return NOT_STORED.code


class BlendPromMetrics(KVConnectorPromMetrics):
    """A Prometheus metric for each of METRICS, of each engine.

    Values of the label ``reason`` are codes (ReasonCode), those of ``phase`` PREFILL_PHASES.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(name: str, metric: Metric) -> Any:
            kind, options = Counter, {}
            if metric.buckets:
                kind, options = Histogram, {"buckets": metric.buckets}
            labels = [*labelnames, *([metric.label] if metric.label else [])]
            return metric_types[kind](
                name=PREFIX + name, documentation=metric.text, labelnames=labels, **options
            )

        self._made = {name: made(name, metric) for name, metric in METRICS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, metric in METRICS.items():
            for value, observed in transfer_stats_data.get(name, {}).items():
                own = self._made[name].labels(*labels, *([value] if metric.label else []))
                if not metric.buckets:
                    own.inc(observed)
                    continue
                for one in observed:
                    own.observe(one)
