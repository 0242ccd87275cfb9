"""Counts what happens to the chunks of one tier, in this process."""

from __future__ import annotations

import threading
from collections import Counter

COUNTED = (
    "hits", "misses", "admitted", "rejected", "refused", "evictions", "expired", "quarantined",
    "errors", "skipped", "dropped",
)  # fmt: skip
"""skipped: reads that were skipped while the tier was out of use. dropped: writes that were skipped
so."""


class Counters:
    """Counters with the names in ``COUNTED``; safe to share between threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, times: int = 1) -> int:
        """Increase a counter; returns its value."""
        with self._lock:
            self._counts[name] += times
            return self._counts[name]

    def all(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTED}
