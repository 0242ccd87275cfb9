"""Blend reports for observers: an instrumentation event, and a list that collects them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.base import BaseEvent

_collecting: ContextVar[tuple[list[dict[str, Any]], ...]] = ContextVar(
    "cacheblend_collecting", default=()
)
_dispatcher = get_dispatcher(__name__)


class CacheBlendReportEvent(BaseEvent):
    """One answer was generated.

    Args:
        report: what was reused (``BlendReport.to_dict()``).
    """

    report: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendReportEvent"


@contextmanager
def collect_reports() -> Iterator[list[dict[str, Any]]]:
    """Collect the reports of every call made inside, in threads' and tasks' own context.

    Yields:
        The reports so far, one an answer (``BlendReport.to_dict()``).
    """
    reports: list[dict[str, Any]] = []
    token = _collecting.set((*_collecting.get(), reports))
    try:
        yield reports
    finally:
        _collecting.reset(token)


class Reporter:
    """Publishes reports to those who listened when the request was made."""

    def __init__(self) -> None:
        self._lists = _collecting.get()

    def publish(self, report: dict[str, Any]) -> None:
        """Send the event and append the report to every collecting list."""
        _dispatcher.event(CacheBlendReportEvent(report=report))
        for reports in self._lists:
            reports.append(report)
