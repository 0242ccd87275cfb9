"""Quantiles of measured seconds."""

from __future__ import annotations

from collections.abc import Sequence


def p95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return sorted(seconds)[min(len(seconds) - 1, int(0.95 * len(seconds)))]
