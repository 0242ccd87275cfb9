"""Interprets a request's report."""

from __future__ import annotations

from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import BlendReport


def keeps_context(report: BlendReport) -> bool:
    """Whether nothing was recomputed on purpose, since each chunk's KV holds its document."""
    why = report.selector_reason
    return why is not None and why.code is ReasonCode.CONTEXT_KEPT
