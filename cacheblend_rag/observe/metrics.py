"""Prometheus metrics of an engine, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.metric_names import COUNTERS, HISTOGRAMS, SECONDS, Metric
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import PREFILL_PHASES, count_chunks, reused_and_recomputed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "cacheblend_"
OWN_COUNTERS: Mapping[str, Metric] = {
    "requests": Metric("Answers, cancelled ones included."),
    "prefix_tokens": Metric("Prompt tokens whose KV is that of a stored or cached prefix."),
    "computed_tokens": Metric("Prompt tokens that had no stored KV."),
}
"""Counters that vLLM's endpoint does not have."""
OWN_HISTOGRAMS: Mapping[str, Metric] = {
    "time_to_first_token_seconds": Metric("Time to first token, of all answers.", None, SECONDS),
}
NOT_TO_BE_BLENDED = frozenset(
    {ReasonCode.NO_CHUNK, ReasonCode.FULL_PREFILL_ASKED, ReasonCode.CANCELLED}
)
"""Codes of requests that no blend was tried for, so that they are no fallbacks."""
TIER_GAUGES = {
    "entries": "Chunks that a tier holds.",
    "bytes": "Bytes that a tier holds.",
    "capacity_bytes": "Bytes that a tier may hold.",
}
TIER_COUNTERS = {
    "hits": "Chunks that were found in a tier",
    "misses": "Chunks that were not found in a tier",
    "admitted": "Chunks that a tier took",
    "rejected": "Chunks that a tier turned away, since those it holds are asked for more often",
    "refused": "Chunks that a tier could not store",
    "evictions": "Chunks that a tier evicted for capacity",
    "expired": "Chunks that a tier removed for their age",
    "quarantined": "Damaged chunks that a tier put aside",
    "errors": "Failures of a tier",
    "skipped": "Reads that were skipped while a tier was out of use",
    "dropped": "Writes that were skipped so",
}
GUARD_COUNTERS = {
    "guard_samples": ("compared", COUNTERS["guard_samples"].text),
    "guard_unknown": ("unknown", "Sampled answers without a reference to compare with."),
    "guard_outdated": ("outdated", "Sampled answers that were served before the latest step."),
    "guard_dropped": ("dropped", "Sampled answers that were not compared."),
    "guard_raised": ("raised", "How often the guard raised the recompute ratio."),
    "guard_lowered": ("lowered", "How often it lowered the ratio again."),
}
"""The field of a GuardReport, and the help, of each metric."""
GUARD_GAUGES = {
    "guard_waiting": ("waiting", "Sampled answers that wait to be compared."),
    "guard_mean_divergence": ("divergence", "Mean divergence from full prefill, in nats a token."),
    "guard_prefill_divergence": ("prefill_divergence", "The same of ordinary prefill."),
    "guard_excess": ("excess", "How much nearer to the reference prefill is than the blend."),
    "guard_ratio": ("ratio", "Least recompute ratio that the guard allows now, 1 if it stopped."),
    "guard_stopped": ("stopped", "1 while the guard has stopped blending, else 0."),
}


class EngineMetrics:
    """Counts an engine's answers, from construction on; works with every engine.

    The names are those of vLLM's endpoint with the prefix ``cacheblend_``. A scrape also asks the
    tiers of the engine's store for their figures, and the engine for its guard's state. The engine
    is held weakly, so that dropping it frees its memory. ``registry`` is one of prometheus_client,
    whose functions serve it or write it to a file.

    Args:
        engine: whose answers are counted, by ``engine.after_answer``.
        registry: where the metrics are registered; by default a new one.

    Raises:
        MissingExtraError: when the extra ``metrics`` is not installed.
        ConfigError: when the registry has an engine's metrics already.
    """

    def __init__(self, engine: Engine, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError("EngineMetrics", "metrics") from error
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._client = prometheus_client
        own = {**COUNTERS, **OWN_COUNTERS}
        try:
            self._counters = {
                name: self._made(prometheus_client.Counter, name, metric)
                for name, metric in own.items()
                if not name.startswith("guard_")  # the collector's
            }
            self._histograms = {
                name: self._made(prometheus_client.Histogram, name, metric, buckets=metric.buckets)
                for name, metric in {**HISTOGRAMS, **OWN_HISTOGRAMS}.items()
            }
        except ValueError as error:
            raise ConfigError(
                "registry has an engine's metrics already: give each engine a registry of its own"
            ) from error
        self.registry.register(_StateCollector(engine))
        engine.after_answer(self._see)

    def _made(self, kind: Any, name: str, metric: Metric, **options: Any) -> Any:
        labels = [metric.label] if metric.label else []
        return kind(PREFIX + name, metric.text, labels, registry=self.registry, **options)

    def _see(self, request: Request, answer: Generation) -> None:
        """Count an answer; an AnswerHook."""
        report, seconds, counters = answer.report, answer.report.seconds, self._counters
        hits, misses = count_chunks(report.chunks)
        for name, counts in (("chunk_hits", hits), ("chunk_misses", misses)):
            for value, count in counts.items():
                counters[name].labels(value).inc(count)
        reused, recomputed = reused_and_recomputed(report.chunks)
        counted = {
            "requests": 1,
            "blended_requests": report.blended,
            "reused_tokens": reused,
            "recomputed_tokens": recomputed,
            "prefix_tokens": report.prefix_tokens,
            "computed_tokens": report.computed_tokens,
        }
        for name, count in counted.items():
            counters[name].inc(count)
        code = report.reason_code
        if code is not None and code not in NOT_TO_BE_BLENDED:
            counters["fallbacks"].labels(code.value).inc()
        if code is ReasonCode.CANCELLED:
            return
        histograms = self._histograms
        histograms["time_to_first_token_seconds"].observe(seconds.time_to_first_token)
        for phase in PREFILL_PHASES:
            if getattr(report.starts, phase) is not None:
                histograms["phase_seconds"].labels(phase).observe(getattr(seconds, phase))
        for tier, waited in seconds.load_by_tier.items():
            histograms["load_seconds"].labels(tier).observe(waited)
        if report.blended:
            histograms["recompute_ratio"].observe(report.recompute_ratio)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return str(self._client.generate_latest(self.registry).decode())


class _StateCollector:
    """Reads the figures of an engine's tiers and of its guard at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; none once the engine is closed or gone."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        engine = self._engine()
        if engine is None or not engine.is_open:
            return
        if engine.guard is not None:
            report = engine.guard_report()
            for name, (field, text) in GUARD_COUNTERS.items():
                yield CounterMetricFamily(PREFIX + name, text, value=getattr(report, field))
            whole = report.divergence * report.compared
            text = COUNTERS["guard_divergence"].text
            yield CounterMetricFamily(f"{PREFIX}guard_divergence", text, value=whole)
            for name, (field, text) in GUARD_GAUGES.items():
                yield GaugeMetricFamily(PREFIX + name, text, value=float(getattr(report, field)))
        store = getattr(engine, "store", None)
        stats = {} if store is None else store.stats()
        told = {name: (GaugeMetricFamily, text) for name, text in TIER_GAUGES.items()}
        told |= {
            name: (CounterMetricFamily, f"{text}, in this process.")
            for name, text in TIER_COUNTERS.items()
        }
        for name, (kind, text) in told.items() if stats else ():
            family = kind(f"{PREFIX}tier_{name}", text, labels=["tier"])
            for tier, figures in stats.items():
                if (value := figures.get(name)) is not None:
                    family.add_metric([tier], value)
            yield family
