"""Speeds: how fast each tier was read lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cacheblend_rag.kv.timings import Estimate, Timings

STALE_SECONDS = 60.0
"""Older measurements say nothing any more: a tier that was slow is given another try."""


class Speeds:
    """Measurements of tiers, by name. May be used by several threads at once.

    clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reads: dict[str, Timings] = {}
        self._lock = threading.Lock()

    def record(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note what reading so many bytes of a tier at once took; nothing where none were."""
        if nbytes <= 0:
            return
        with self._lock:
            reads = self._reads.setdefault(tier, Timings(STALE_SECONDS, self._clock))
            reads.add(nbytes, max(seconds, 0.0))

    def of(self, tier: str) -> Estimate | None:
        """Return how fast a tier was read lately, in bytes; None where that is not known."""
        with self._lock:
            reads = self._reads.get(tier)
            return None if reads is None else reads.estimate()
