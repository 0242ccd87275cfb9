"""Measures the recent read speed of each tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cacheblend_rag.kv.timings import Estimate, Timings

STALE_SECONDS = 60.0
"""Age at which measurements expire, so that a tier that was slow is tried again."""


class Speeds:
    """Measurements of tiers, by name. May be used by several threads at once.

    clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reads: dict[str, Timings] = {}
        self._lock = threading.Lock()

    def record(self, tier: str, nbytes: int, seconds: float) -> None:
        """Record the duration of a read; a read of no bytes is ignored."""
        if nbytes <= 0:
            return
        with self._lock:
            reads = self._reads.setdefault(tier, Timings(STALE_SECONDS, self._clock))
            reads.add(nbytes, max(seconds, 0.0))

    def of(self, tier: str) -> Estimate | None:
        """Return the recent speed of a tier, in bytes; None if unknown."""
        with self._lock:
            reads = self._reads.get(tier)
            return None if reads is None else reads.estimate()
