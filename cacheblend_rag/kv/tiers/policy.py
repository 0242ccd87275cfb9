"""How one tier is used, what it holds, and what is counted of it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from cacheblend_rag.errors import StoreError

Admit = Literal["frequency", "always"]


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """How one tier is used; the same for every kind of tier.

    Args:
        capacity_bytes: capacity for chunk KV; None is without limit.
        ttl_seconds: time after which the tier's copy expires, counted from when the chunk was first
            stored; None is the store's own.
        promote: whether chunks found in a slower tier are kept here, too.
        admit: what a full tier accepts: ``frequency`` only chunks requested more often than those
            they would displace, ``always`` all, evicting the least recently used.
        timeout_seconds: an answer that takes longer counts as a failure; None is never.
        read_only: nothing here is written, removed, quarantined or marked as used.

    Raises:
        StoreError: when a field is out of range.
    """

    capacity_bytes: int | None = None
    ttl_seconds: float | None = None
    promote: bool = True
    admit: Admit = "frequency"
    timeout_seconds: float | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and self.capacity_bytes < 0:
            raise StoreError(f"capacity_bytes={self.capacity_bytes} must be at least 0")
        for name in ("ttl_seconds", "timeout_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise StoreError(f"{name}={seconds} must be above 0")
        if self.admit not in get_args(Admit):
            raise StoreError(f"admit={self.admit!r} must be one of {', '.join(get_args(Admit))}")

    @classmethod
    def of(cls, capacity_bytes: int | None, policy: TierPolicy | None) -> TierPolicy:
        """Return ``policy``, or the default for a capacity.

        Raises:
            StoreError: when both set the capacity.
        """
        if policy is None:
            return cls(capacity_bytes)
        if capacity_bytes is not None:
            raise StoreError("capacity_bytes= and policy= both set the capacity: give only policy=")
        return policy


@dataclass(frozen=True, slots=True)
class Usage:
    """A tier's current number of chunks and bytes."""

    entries: int
    nbytes: int


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
