"""Measures reads and waits for them, and estimates the speed of tiers and the duration of work.

Estimates are medians of recent measurements, which resist outliers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median

from cacheblend_rag.kv.shared_chunk import Found, Part

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
        count: how many measurements there are.
    """

    latency: float
    units_per_second: float
    count: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements for a decision."""
        return self.count >= LEAST

    def seconds(self, units: float) -> float:
        """Return the estimated seconds for so much work."""
        return self.latency + units / self.units_per_second


class Speeds:
    """The latest measurements by name, such as of tiers. May be used by several threads at once.

    clock: returns the time in seconds. keep_seconds: age at which a measurement expires.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, keep_seconds: float = STALE_SECONDS
    ) -> None:
        self._clock, self._keep_seconds = clock, keep_seconds
        self._measured: dict[str, deque[tuple[float, float, float]]] = {}
        self._lock = threading.Lock()

    def record(self, name: str, units: float, seconds: float) -> None:
        """Record the duration of work, such as a read of so many bytes; no work is ignored."""
        if units > 0:
            with self._lock:
                measured = self._measured.setdefault(name, deque(maxlen=KEPT))
                measured.append((self._clock(), units, max(seconds, 0.0)))

    def of(self, name: str) -> Estimate | None:
        """Return the recent speed of a tier, say; None if unknown."""
        oldest = self._clock() - self._keep_seconds
        with self._lock:
            measured = list(self._measured.get(name, ()))
        recent = [(units, seconds) for at, units, seconds in measured if at >= oldest]
        if not recent:
            return None
        latency, per_unit = _line(recent) or (0.0, median(s / units for units, s in recent))
        return Estimate(latency, 1 / max(per_unit, 1e-15), len(recent))


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


class BusySeconds:
    """Counts the seconds in which at least one read is in flight; concurrent reads count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._since, self._total = 0, 0.0, 0.0

    def watch(self, future: Future[Part] | Future[Found]) -> None:
        """Count the time from now until ``future`` is done as time in which a read is in flight."""
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        future.add_done_callback(self._end)

    def _end(self, _: Future[Part] | Future[Found]) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._total += time.perf_counter() - self._since

    @property
    def total(self) -> float:
        """Seconds so far."""
        with self._lock:
            running = time.perf_counter() - self._since if self._under_way else 0.0
            return self._total + running


class LayerWait:
    """A wait, from construction until ``seconds``, for the reads of one layer.

    reads: each with its tier; None if it is done. began: a reading of ``time.perf_counter``.
    """

    def __init__(self, reads: Iterable[tuple[str, Future[Part] | None]]) -> None:
        self.began = time.perf_counter()
        self._last, self._tiers = "", list[str]()
        for tier, read in reads:
            self._last = self._last or tier
            self._tiers.append(tier)
            if read is not None and not read.done():
                read.add_done_callback(partial(self._note, tier))

    def seconds(self, without: float = 0.0) -> dict[str, float]:
        """Return the seconds by tier: of the wait for the last to be read, 0 for the others.

        without: seconds since the last read that were spent on other work.
        """
        waited = max(0.0, time.perf_counter() - without - self.began)
        return {tier: waited if tier == self._last else 0.0 for tier in self._tiers}

    def _note(self, tier: str, _: Future[Part]) -> None:
        self._last = tier
