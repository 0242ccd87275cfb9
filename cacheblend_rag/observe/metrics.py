"""Prometheus metrics of an engine, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import ref

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.metric_names import COUNTERS, HISTOGRAMS, SECONDS, Metric
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import PREFILL_PHASES, count_chunks, reused_and_recomputed

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

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
GUARD_COUNTERS = {
    "compared": ("guard_samples", COUNTERS["guard_samples"].text),
    "unknown": ("guard_unknown", "Sampled answers without a reference to compare with."),
    "outdated": ("guard_outdated", "Sampled answers that were served before the latest step."),
    "dropped": ("guard_dropped", "Sampled answers that were not compared."),
    "raised": ("guard_raised", "How often the guard raised the recompute ratio."),
    "lowered": ("guard_lowered", "How often it lowered the ratio again."),
}
GUARD_GAUGES = {
    "waiting": ("guard_waiting", "Sampled answers that wait to be compared."),
    "divergence": ("guard_mean_divergence", "Mean divergence from full prefill, in nats a token."),
    "prefill_divergence": ("guard_prefill_divergence", "The same of ordinary prefill."),
    "excess": ("guard_excess", "How much nearer to the reference prefill is than the blend."),
    "ratio": ("guard_ratio", "Least recompute ratio that the guard allows now, 1 if it stopped."),
    "stopped": ("guard_stopped", "1 while the guard has stopped blending, else 0."),
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


class EngineMetrics:
    """Counts an engine's answers, from construction on; works with every engine.

    The names are those of vLLM's endpoint with the prefix ``cacheblend_``. A scrape also asks the
    tiers of the engine's store for their figures, and the engine for its guard's state. The engine
    is held weakly, so that dropping it frees its memory.

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
        try:
            counters = {
                name: self._made(prometheus_client.Counter, name, metric)
                for name, metric in {**COUNTERS, **OWN_COUNTERS}.items()
                if not name.startswith("guard_")  # the collector's
            }
            histograms = {
                name: self._made(prometheus_client.Histogram, name, metric, buckets=metric.buckets)
                for name, metric in {**HISTOGRAMS, **OWN_HISTOGRAMS}.items()
            }
        except ValueError as error:
            raise ConfigError(
                "registry has an engine's metrics already: give each engine a registry of its own"
            ) from error
        self._counters, self._histograms = counters, histograms
        self.registry.register(_StateCollector(engine))
        engine.after_answer(self._see)

    def _made(self, kind: Any, name: str, metric: Metric, **options: Any) -> Any:
        labels = [metric.label] if metric.label else []
        return kind(PREFIX + name, metric.text, labels, registry=self.registry, **options)

    def _see(self, request: Request, answer: Generation) -> None:
        """Count an answer; an AnswerHook."""
        report, counters = answer.report, self._counters
        seconds = report.seconds
        counters["requests"].inc()
        for name, counts in zip(
            ("chunk_hits", "chunk_misses"), count_chunks(report.chunks), strict=True
        ):
            for value, count in counts.items():
                counters[name].labels(value).inc(count)
        reused, recomputed = reused_and_recomputed(report.chunks)
        counters["reused_tokens"].inc(reused)
        counters["recomputed_tokens"].inc(recomputed)
        counters["prefix_tokens"].inc(report.prefix_tokens)
        counters["computed_tokens"].inc(report.computed_tokens)
        counters["blended_requests"].inc(report.blended)
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

    def write(self, path: str | Path) -> None:
        """Write ``text`` to a file at once, for a textfile collector; it is never half written."""
        self._client.write_to_textfile(str(path), self.registry)

    def serve(self, port: int, host: str = "127.0.0.1") -> tuple[WSGIServer, Thread]:
        """Serve the metrics over HTTP, in a thread, until ``server.shutdown()``.

        Args:
            port: to listen at; 0 takes a free one (``server.server_port``).
            host: the address; without a key, everybody who reaches it can read the metrics.

        Returns:
            The server and its thread.
        """
        server, thread = self._client.start_http_server(port, host, self.registry)
        return server, thread


class _StateCollector:
    """Reads the figures of an engine's tiers and of its guard at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; none once the engine is closed or gone."""
        engine = self._engine()
        if engine is None or not engine.is_open:
            return
        yield from _guard_metrics(engine)
        store = getattr(engine, "store", None)
        if store is not None:
            yield from _tier_metrics(store.stats())


def _guard_metrics(engine: Engine) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    if engine.guard is None:
        return
    report = engine.guard_report()
    for field, (name, text) in GUARD_COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=getattr(report, field))
    yield CounterMetricFamily(
        f"{PREFIX}guard_divergence",
        COUNTERS["guard_divergence"].text,
        value=report.divergence * report.compared,
    )
    for field, (name, text) in GUARD_GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=float(getattr(report, field)))


def _tier_metrics(stats: Mapping[str, Mapping[str, int | None]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"{PREFIX}tier_{name}", text, labels=["tier"])
        for tier, figures in stats.items():
            if (value := figures.get(name)) is not None:
                gauge.add_metric([tier], value)
        yield gauge
    for name, text in TIER_COUNTERS.items():
        counter = CounterMetricFamily(
            f"{PREFIX}tier_{name}", f"{text}, in this process.", labels=["tier"]
        )
        for tier, figures in stats.items():
            counter.add_metric([tier], figures.get(name) or 0)
        yield counter
