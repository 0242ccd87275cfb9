"""Logs one line per request at DEBUG: what was reused, and what the time was spent on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from cacheblend_rag.report import (
    PREFILL_PHASES,
    BlendReport,
    ChunkReport,
    count_chunks,
    reused_and_recomputed,
)

logger = logging.getLogger(__name__)


def log_report(report: BlendReport) -> None:
    """Log a request's summary; codes and numbers only, no text of the prompt."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    why = "" if report.reason is None else f" ({report.reason.code.value})"
    logger.debug(
        "request %s: %d tokens reused, %d recomputed, %d computed%s; %s; first token %.1f ms: %s",
        report.request_id,
        report.reused_tokens,
        report.recomputed_tokens,
        report.computed_tokens,
        why,
        hits(report.chunks),
        report.seconds.time_to_first_token * 1000,
        phases(vars(report.seconds), report.seconds.load_by_tier),
    )


def log_blend(
    request_id: str,
    chunks: Iterable[ChunkReport],
    seconds: Mapping[str, float],
    load_by_tier: Mapping[str, float],
) -> None:
    """Log what a worker's blend of a request reused, and its phases."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    chunks = list(chunks)
    logger.debug(
        "request %s: %d tokens reused, %d recomputed; %s; %s",
        request_id,
        *reused_and_recomputed(chunks),
        hits(chunks),
        phases(seconds, load_by_tier),
    )


def hits(chunks: Iterable[ChunkReport]) -> str:
    """Return how many chunks were hits in which tier, and misses by code."""
    chunks = list(chunks)
    found, missed = count_chunks(chunks)
    told = [f"{count} {name}" for name, count in sorted((found + missed).items())]
    return f"{found.total()} of {len(chunks)} chunks hit" + (f" ({', '.join(told)})" * bool(told))


def phases(seconds: Mapping[str, float], load_by_tier: Mapping[str, float]) -> str:
    """Return the phases that took time, in milliseconds, and loading by tier."""
    spent = [(name, seconds.get(name, 0.0)) for name in PREFILL_PHASES]
    told = [f"{name} {value * 1000:.1f}" for name, value in spent if value]
    tiers = [f"{tier} {value * 1000:.1f}" for tier, value in load_by_tier.items()]
    return " ".join(told) + (f" (load from {', '.join(tiers)})" * bool(tiers))
