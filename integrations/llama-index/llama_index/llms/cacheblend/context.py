"""What a call finds in its thread's or task's context: hints, and lists that collect reports.

Hints are the retrieved chunks of the query at hand, from the postprocessor to the LLM. One only
prefers one chunk over another of the same text: with wrong hints, or none, an answer is as right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.base import BaseEvent

from cacheblend_rag import Chunk

Hint = tuple[Chunk, ...]
"""A retrieved node's text as prompts may show it: with its metadata, and bare."""

EDGE_CHARACTERS = 48
_expected: ContextVar[tuple[Hint, ...]] = ContextVar("cacheblend_hints", default=())
_collecting: ContextVar[tuple[list[dict[str, Any]], ...]] = ContextVar(
    "cacheblend_collecting", default=()
)
_dispatcher = get_dispatcher(__name__)


def expect(hints: Sequence[Hint]) -> None:
    """Let the following calls of this thread or task expect these nodes, and no others."""
    _expected.set(tuple(hints))


def hints_in(prompt: str) -> list[Chunk]:
    """Return the retrieved nodes, as chunks, whose text occurs in ``prompt``, whole or in part.

    Of a node that stands there neither whole nor in part (it belongs to another call of the same
    query) nothing is said.
    """
    found: list[Chunk] = []
    absent: list[Hint] = []
    rest = prompt
    for hint in sorted(_expected.get(), key=lambda hint: -len(hint[0].text)):
        chunk = next((one for one in hint if one.text and one.text in rest), None)
        if chunk is None:
            absent.append(hint)
        else:
            found.append(chunk)
            rest = rest.replace(chunk.text, "\n")
    return found + [hint[0] for hint in absent if _stands_cut(hint[-1].text, rest)]


def _stands_cut(text: str, prompt: str) -> bool:
    return bool(text) and (text[:EDGE_CHARACTERS] in prompt or text[-EDGE_CHARACTERS:] in prompt)


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


def collecting() -> Sequence[list[dict[str, Any]]]:
    """Return the lists that collect reports here."""
    return _collecting.get()


def publish(report: dict[str, Any], lists: Sequence[list[dict[str, Any]]]) -> None:
    """Send the event, and append the report to lists."""
    _dispatcher.event(CacheBlendReportEvent(report=report))
    for reports in lists:
        reports.append(report)
