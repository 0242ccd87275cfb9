"""The names, labels and buckets of metrics of blending, which vLLM's endpoint and engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
NATS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, or with ``buckets`` a histogram; label: its own label, if it has one."""

    text: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


COUNTERS: Mapping[str, Metric] = {
    "chunk_hits": Metric("Chunks of prompts whose stored KV was reused, by tier.", "tier"),
    "chunk_misses": Metric(
        "Chunks of prompts whose KV was not stored, or not usable, by reason code.", "reason"
    ),
    "reused_tokens": Metric("Prompt tokens that kept their stored KV."),
    "recomputed_tokens": Metric("Prompt tokens that had stored KV and were computed afresh."),
    "blended_requests": Metric("Requests answered with stored KV."),
    "fallbacks": Metric(
        "Requests to be blended that ordinary prefill answered, by reason code.", "reason"
    ),
    "guard_samples": Metric("Blended answers that were compared with full prefill."),
    "guard_divergence": Metric("Sum of their divergences from it, in nats per token."),
}
HISTOGRAMS: Mapping[str, Metric] = {
    "phase_seconds": Metric(
        "Parts of the time to first token of requests to be blended, by phase.", "phase", SECONDS
    ),
    "load_seconds": Metric(
        "Waiting for stored KV of blended requests, by the tier waited for.", "tier", SECONDS
    ),
    "recompute_ratio": Metric(
        "Share of chunk tokens that blended requests recompute.", None, SHARES
    ),
}
