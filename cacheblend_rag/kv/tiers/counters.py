"""Counts what happens to the chunks of one tier, in this process."""

from __future__ import annotations

import threading
from collections import Counter

COUNTED = (
    "hits", "misses", "admitted", "rejected", "refused", "evictions", "expired", "quarantined",
    "errors", "skipped", "dropped", "queued",
)  # fmt: skip
"""skipped: reads that a tier was not asked for while it was out. dropped: writes it missed so, or
that found no room in its queue. queued: chunks that wait to be written."""


class Counters:
    """Counts by name, of those in ``COUNTED``; safe to share between threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """Go on in a forked process, where whoever held the lock is no more."""
        self._lock = threading.Lock()

    def add(self, name: str, times: int = 1) -> int:
        """Count something; returns how often it has happened."""
        with self._lock:
            self._counts[name] += times
            return self._counts[name]

    def all(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTED}
