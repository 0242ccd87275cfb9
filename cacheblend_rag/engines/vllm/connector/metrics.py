"""Counters and histograms of blending for vLLM's metrics endpoint and its log line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheblend_rag.engines import metric_names
from cacheblend_rag.engines.metric_names import Metric
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    CompareResult,
    Declined,
    Failed,
    Result,
)
from cacheblend_rag.prefill.policy import NOT_STORED
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import PREFILL_PHASES, count_chunks, reused_and_recomputed

PREFIX = "vllm:cacheblend_"
COUNTERS: Mapping[str, Metric] = {
    **metric_names.COUNTERS,
    "blend_seconds": Metric("Seconds of work on blended requests."),
    "found_requests": Metric("Requests in whose prompts the server itself found stored chunks."),
    "found_tokens": Metric("Tokens of the chunks that it found."),
    "find_seconds": Metric("Seconds that the scheduler has searched prompts for chunks."),
}
HISTOGRAMS: Mapping[str, Metric] = {
    **metric_names.HISTOGRAMS,
    "guard_sample_divergence": Metric(
        "Divergence of blended answers from full prefill, in nats per token.",
        None,
        metric_names.NATS,
    ),
}
KEPT = 1024
"""Most observations kept per histogram and label value until vLLM collects them."""


class BlendStats(KVConnectorStats):
    """Counter increments and histogram observations since vLLM last collected them.

    They are named as in COUNTERS and HISTOGRAMS.

    A counter with a label has one count per value of it. Histograms have a list of values per
    value of their label, under "" without one.
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
            _add(self.data, "guard_sample_divergence", {"": [result.divergence]})
            return
        chunks = (result.chunks or ()) if isinstance(result, BlendResult | Declined) else ()
        hits, misses = count_chunks(chunks)
        reused, recomputed = reused_and_recomputed(chunks)
        counted = {
            "chunk_hits": hits,
            "reused_tokens": reused,
            "recomputed_tokens": recomputed,
            "blended_requests": int(bool(hits)),
            "blend_seconds": getattr(result, "work_seconds", None) or 0.0,
            "chunk_misses": misses,
            "fallbacks": {} if hits else {_fallback_code(result): 1},
            **_values(result, blended=bool(hits)),
        }
        for name, value in counted.items():
            _add(self.data, name, value)

    def record_found(self, tokens: int, seconds: float) -> None:
        """Count a prompt that was searched for chunks.

        tokens: of the chunks in it, 0 if nothing is to be reused. seconds: of searching.
        """
        _add(self.data, "found_requests", int(tokens > 0))
        _add(self.data, "found_tokens", tokens)
        _add(self.data, "find_seconds", seconds)

    def reset(self) -> None:
        """Count from zero again."""
        self.data: dict[str, Any] = {
            **{name: {} if metric.label else 0 for name, metric in COUNTERS.items()},
            **{name: {} for name in HISTOGRAMS},
        }

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another part has counted."""
        for name, value in other.data.items():
            _add(self.data, name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of vLLM's log line: sums, then the counts by label."""
        told: dict[str, int | float] = {}
        for name, metric in COUNTERS.items():
            counts = self.data[name]
            told[name] = sum(counts.values()) if metric.label else round(counts, 3)
            if metric.label:
                told |= {f"{name}_{value}": count for value, count in counts.items()}
        return told

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


def _values(result: Result, *, blended: bool) -> dict[str, dict[str, list[float]]]:
    """Return the values of histograms that a result adds."""
    if not isinstance(result, BlendResult | Declined):
        return {}
    seconds = result.seconds or {}
    told = {"phase_seconds": {name: [seconds[name]] for name in PREFILL_PHASES if name in seconds}}
    if isinstance(result, BlendResult) and blended:
        told["load_seconds"] = {tier: [spent] for tier, spent in result.load_by_tier.items()}
        told["recompute_ratio"] = {"": [result.ratio]}
    return told


def _add(data: dict[str, Any], name: str, value: Any) -> None:
    """Add to the count of a name, to its counts by label, or to its lists of values."""
    if name in HISTOGRAMS:
        for label, values in value.items():
            kept = data[name].setdefault(label, [])
            kept += values[: KEPT - len(kept)]
    elif COUNTERS[name].label is None:
        data[name] += value
    else:
        for label, count in value.items():
            data[name][str(label)] = data[name].get(str(label), 0) + count


def _fallback_code(result: Result) -> ReasonCode:
    """Return the code of why ordinary prefill answered instead of a blend."""
    match result:
        case Failed(error=why) | Declined(reason=why):
            return why.code
        case _:
            return NOT_STORED.code


class BlendPromMetrics(KVConnectorPromMetrics):
    """A Prometheus metric for each of COUNTERS and HISTOGRAMS, of each engine.

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

        def made(kind: Any, name: str, metric: Metric, **options: Any) -> Any:
            labels = [*labelnames, *([metric.label] if metric.label else [])]
            return kind(name=PREFIX + name, documentation=metric.text, labelnames=labels, **options)

        self._counters = {
            name: made(metric_types[Counter], name, one) for name, one in COUNTERS.items()
        }
        self._histograms = {
            name: made(metric_types[Histogram], name, one, buckets=one.buckets)
            for name, one in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            counted = transfer_stats_data.get(name, 0)
            if COUNTERS[name].label is None:
                counter.labels(*labels).inc(counted)
                continue
            for value, count in (counted or {}).items():
                counter.labels(*labels, value).inc(count)
        for name, histogram in self._histograms.items():
            for value, observed in transfer_stats_data.get(name, {}).items():
                own = [value] if HISTOGRAMS[name].label else []
                for one in observed:
                    histogram.labels(*labels, *own).observe(one)
