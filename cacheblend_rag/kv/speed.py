"""Speeds: how fast each tier was read lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

FADE = 0.8
"""What a measurement still counts for when the next one is there."""
STALE_SECONDS = 60.0
"""Older measurements say nothing any more: a tier that was slow is given another try."""


@dataclass
class _Reads:
    """Faded sums over reads: of 1, bytes, bytes squared, seconds, bytes times seconds."""

    count: float = 0.0
    nbytes: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    measured_at: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        new = (1.0, nbytes, nbytes * nbytes, seconds, nbytes * seconds)
        names = ("count", "nbytes", "squares", "seconds", "products")
        for name, value in zip(names, new, strict=True):
            setattr(self, name, FADE * getattr(self, name) + value)

    def speed(self) -> Speed:
        """Fit seconds = latency + nbytes / bytes_per_second, neither of them below 0."""
        spread = self.count * self.squares - self.nbytes**2
        per_byte, latency = self.seconds / self.nbytes, 0.0
        if spread > 1e-6 * self.nbytes**2:  # else reads were of one size, and tell no two numbers
            slope = (self.count * self.products - self.nbytes * self.seconds) / spread
            start = (self.seconds - slope * self.nbytes) / self.count
            if slope > 0 and start >= 0:
                per_byte, latency = slope, start
        return Speed(latency, 1 / max(per_byte, 1e-15))


@dataclass(frozen=True, slots=True)
class Speed:
    """What reading takes. latency: seconds that each read takes whatever its size."""

    latency: float
    bytes_per_second: float

    def seconds(self, nbytes: int) -> float:
        """Return what reading so many bytes at once takes."""
        return self.latency + nbytes / self.bytes_per_second


class Speeds:
    """Measurements of tiers, by name. May be used by several threads at once.

    clock: says what time it is, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reads: dict[str, _Reads] = {}
        self._lock = threading.Lock()

    def record(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note what reading so many bytes of a tier at once took; nothing where none were."""
        if nbytes <= 0:
            return
        with self._lock:
            reads = self._reads.setdefault(tier, _Reads())
            reads.add(nbytes, max(seconds, 0.0))
            reads.measured_at = self._clock()

    def of(self, tier: str) -> Speed | None:
        """Return how fast a tier was read lately; None where that is not known."""
        with self._lock:
            reads = self._reads.get(tier)
            if reads is None or self._clock() - reads.measured_at > STALE_SECONDS:
                return None
            return reads.speed()
