"""Interprets a request's report."""

from __future__ import annotations

from cacheblend_rag.prefill.prompt_pass import CONTEXT_KEPT
from cacheblend_rag.report import BlendReport


def keeps_context(report: BlendReport) -> bool:
    """Whether nothing was recomputed on purpose, since each chunk's KV holds its document."""
    return report.selector_reason == CONTEXT_KEPT
