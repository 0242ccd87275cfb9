"""Stored: what became of chunks whose KV was to be stored, and the sum of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheblend_rag.report import PrecomputeReport


@dataclass(frozen=True)
class Stored:
    """What became of some chunks that were to be stored; every one is counted once.

    computed_tokens: of the computed ones. refused: how many were not stored, by reason.
    """

    computed: int = 0
    skipped: int = 0
    computed_tokens: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """How many chunks this tells of."""
        return self.computed + self.skipped + sum(self.refused.values())


class Tally:
    """Adds up what became of chunks that were to be stored."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def add(self, done: Stored) -> None:
        """Count some more chunks."""
        self._counts.update(
            computed=done.computed, skipped=done.skipped, tokens=done.computed_tokens
        )
        self.refused.update(done.refused)

    def report(self, seconds: float, replaced: int) -> PrecomputeReport:
        """Return the totals."""
        return PrecomputeReport(
            computed=self._counts["computed"],
            skipped=self._counts["skipped"],
            computed_tokens=self._counts["tokens"],
            seconds=seconds,
            refused=dict(+self.refused),
            replaced=replaced,
        )
