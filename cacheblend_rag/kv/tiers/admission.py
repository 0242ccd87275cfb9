"""Admission and eviction by access frequency (TinyLFU).

As TinyLFU over the order of last use: it is counted how often keys were seen recently, stored or
not, and a chunk replaces others only if it was seen more often. Libraries for this (theine) count
entries, own the values and have no pins; here sizes differ, some chunks are pinned, and several
processes may share the order of last use. So the tier keeps the order, and this module adds only
the counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.policy import Counters, TierPolicy, Usage

LOOKED_AT = 32
"""Number of least recently used chunks from which the least often seen ones are evicted."""
SAMPLE, LEAST_HALVED = 16, 1 << 11
"""Accesses per held chunk, and in all, after which counts are halved."""


class RefusedError(Exception):
    """A tier's ``_save`` refuses a chunk; the message says why. ``put`` handles it."""


class RejectedError(RefusedError):
    """A full tier holds only chunks that are requested at least as often."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A candidate for eviction. seen: accesses that its tier knows of besides."""

    key: KVKey
    nbytes: int
    seen: int = 0


class Capacity:
    """Keeps one tier, which may be without limit, within its capacity.

    The tier knows its chunks and evicts them; this class says which, and counts them.
    """

    def __init__(self, policy: TierPolicy, counts: Counters) -> None:
        self._bytes, self._counts = policy.capacity_bytes, counts
        self._by_frequency = policy.admit == "frequency" and policy.capacity_bytes is not None
        self._lock = threading.Lock()
        self._sightings = Counter[int]()  # by hash of the key, which takes less memory
        self._added, self._halved_after = 0, LEAST_HALVED

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count accesses of keys, stored or not; now and then all counts are halved."""
        if not self._by_frequency:
            return
        for key in keys:
            with self._lock:
                self._sightings[hash(key)] += 1
                self._added += 1
                if self._added >= self._halved_after:  # old accesses count less and less
                    kept = {own: n >> 1 for own, n in self._sightings.items() if n > 1}
                    self._sightings, self._added = Counter(kept), 0

    def check_fits(self, nbytes: int) -> None:
        """Raise RefusedError for a chunk that is larger than the capacity."""
        if self._bytes is not None and nbytes > self._bytes:
            raise RefusedError(f"{nbytes} bytes, capacity is {self._bytes}")

    def victims(
        self, key: KVKey, nbytes: int, others: Usage, by_last_use: Iterable[Resident]
    ) -> list[KVKey]:
        """Return the chunks to evict so that a chunk fits.

        Raises RefusedError if too little can be evicted, RejectedError if it is not worth it.

        Args:
            key: the new chunk.
            nbytes: its size.
            others: what the tier holds besides.
            by_last_use: of these the ones that are not pinned, the least recently used first.
        """
        excess = 0 if self._bytes is None else others.nbytes + nbytes - self._bytes
        if excess <= 0:
            return []
        self._halved_after = max(LEAST_HALVED, SAMPLE * others.entries)
        order = iter(by_last_use)
        looked_at = [*_freeing(order, excess), *islice(order, LOOKED_AT - 1)]
        needed = list(_freeing(sorted(looked_at, key=self._seen), excess))
        missing = excess - sum(one.nbytes for one in needed)
        if missing > 0:
            raise RefusedError(f"{missing} bytes do not fit beside pinned chunks")
        self._check_worth(key, needed)
        return [one.key for one in needed]

    def count(self, evicted: Sequence[KVKey]) -> None:
        """Count chunks that were evicted for another one."""
        if evicted:
            self._counts.add("admitted")
            self._counts.add("evictions", len(evicted))

    def _seen(self, one: Resident) -> int:
        return max(self._sightings[hash(one.key)], one.seen) if self._by_frequency else 0

    def _check_worth(self, key: KVKey, victims: Sequence[Resident]) -> None:
        """Reject a chunk that is not requested more often than the ones it would displace.

        Counts of 1 say nothing: among such chunks the newest is taken. For higher counts a
        difference of 1 is not enough: chunks of a loop differ by that, and each would displace the
        next.
        """
        own = self._sightings[hash(key)]
        total = sum(one.nbytes for one in victims)
        theirs = sum(self._seen(one) * one.nbytes for one in victims) / total if total else 0
        if own < theirs or 1 < theirs > own - 2:
            raise RejectedError(f"requested {own} times, the chunks to evict {theirs:g} times")


def _freeing(order: Iterable[Resident], excess: int) -> Iterator[Resident]:
    """Yield as many of the first candidates as free so many bytes."""
    for one in order:
        yield one
        excess -= one.nbytes
        if excess <= 0:
            return
