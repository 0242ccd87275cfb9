"""Counts the results of storing chunk KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import Evicted, PrecomputeReport


@dataclass(frozen=True)
class Stored:
    """The results of storing some chunks; each chunk is counted once.

    computed_tokens: of the computed ones. refused: how many were not stored, by reason. failed:
    how many of these may be stored another time.
    """

    computed: int = 0
    skipped: int = 0
    computed_tokens: int = 0
    refused: Mapping[Reason, int] = field(default_factory=dict)
    failed: Mapping[Reason, int] = field(default_factory=dict)

    @classmethod
    def failure(cls, reason: Reason, chunks: int = 1) -> Stored:
        """Return the result for chunks that failed for a temporary reason."""
        return cls(refused={reason: chunks}, failed={reason: chunks})

    @classmethod
    def after_put(cls, result: PutResult, tokens: int) -> Stored:
        """Return the result for a computed chunk of so many tokens after a put."""
        if result.refusal:
            refused = {result.refusal: 1}
            return cls(refused=refused, failed=refused if result.failure else {})
        return cls(computed=1, computed_tokens=tokens)

    @property
    def chunks(self) -> int:
        """The number of chunks counted."""
        return self.computed + self.skipped + sum(self.refused.values())


class Tally:
    """Adds up results of storing chunks."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.refused: Counter[Reason] = Counter()
        self.failed: Counter[Reason] = Counter()

    def add(self, done: Stored) -> None:
        """Count some more chunks."""
        self._counts.update(
            computed=done.computed, skipped=done.skipped, tokens=done.computed_tokens
        )
        self.refused.update(done.refused)
        self.failed.update(done.failed)

    def report(self, seconds: float, replaced: Evicted) -> PrecomputeReport:
        """Return the totals."""
        return PrecomputeReport(
            computed=self._counts["computed"],
            skipped=self._counts["skipped"],
            computed_tokens=self._counts["tokens"],
            seconds=seconds,
            refused=dict(+self.refused),
            replaced=replaced,
            failed=dict(+self.failed),
        )
