"""Estimates the duration of work, and the speed of tiers, from recent measurements.

By medians, which resist outliers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import median

KEPT = 5
"""How many of the latest measurements count."""
LEAST = 3
"""Least measurements for a decision: with three, one outlier does not move the median."""
SIZES_APART = 2.0
"""Least ratio of the largest to the smallest size for separating a fixed part."""


STALE_SECONDS = 60.0
"""Age at which measurements expire, so that a tier that was slow is tried again."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated duration of work.

    Args:
        latency: fixed seconds, whatever the size.
        units_per_second: rate beyond that.
        spread: median distance of the measurements from the estimate, as a share of it.
        count: how many measurements there are.
    """

    latency: float
    units_per_second: float
    spread: float = 0.0
    count: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements for a decision."""
        return self.count >= LEAST

    def seconds(self, units: float) -> float:
        """Return the estimated seconds for so much work."""
        return self.latency + units / self.units_per_second


class Timings:
    """The latest measurements of one kind of work. Not thread-safe.

    Args:
        keep_seconds: age at which a measurement expires.
        clock: returns the time in seconds.
    """

    def __init__(self, keep_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_seconds, self._clock = keep_seconds, clock
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    def add(self, units: float, seconds: float) -> None:
        """Record the seconds of an amount of work above 0."""
        self._measured.append((self._clock(), units, seconds))

    def estimate(self) -> Estimate | None:
        """Return the estimate; None without recent measurements."""
        oldest = self._clock() - self._keep_seconds
        recent = [(units, seconds) for at, units, seconds in self._measured if at >= oldest]
        if not recent:
            return None
        latency, per_unit = _line(recent) or (0.0, median(s / units for units, s in recent))
        estimate = Estimate(latency, 1 / max(per_unit, 1e-15), count=len(recent))
        off = median(abs(seconds / estimate.seconds(units) - 1) for units, seconds in recent)
        return Estimate(latency, estimate.units_per_second, off, len(recent))


def _line(measured: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Fit seconds = latency + units * per_unit by medians (Theil and Sen), neither below 0.

    None where the measurements are too few, or of too similar sizes, to tell two numbers.
    """
    sizes = [units for units, _ in measured]
    if len(measured) < KEPT or max(sizes) < SIZES_APART * min(sizes):
        return None
    pairs = combinations(measured, 2)
    per_unit = median((t - s) / (v - u) for (u, s), (v, t) in pairs if u != v)
    latency = median(seconds - per_unit * units for units, seconds in measured)
    return (latency, per_unit) if per_unit > 0 and latency >= 0 else None


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
