"""Explain: what a request's report means."""

from __future__ import annotations

from cacheblend_rag.prefill.prompt_pass import CONTEXT_KEPT
from cacheblend_rag.report import BlendReport


def keeps_context(report: BlendReport) -> bool:
    """Whether nothing was recomputed on purpose: each chunk's KV knows its own document."""
    return report.selector_reason == CONTEXT_KEPT
