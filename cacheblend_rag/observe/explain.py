"""Explain: what a request's report means."""

from __future__ import annotations

from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import BlendReport


def keeps_context(report: BlendReport) -> bool:
    """Whether nothing was recomputed on purpose: each chunk's KV knows its own document."""
    why = report.selector_reason
    return why is not None and why.code is ReasonCode.CONTEXT_KEPT
