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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.policy import Counters, TierPolicy

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


class Sightings:
    """Recent access counts of keys, stored or not; now and then all are halved."""

    def __init__(self) -> None:
        self._counts = Counter[int]()  # by hash, which takes less memory
        self._added, self._every = 0, LEAST_HALVED
        self._lock = threading.Lock()

    def add(self, key: KVKey) -> None:
        """Count one access of a key."""
        with self._lock:
            self._counts[hash(key)] += 1
            self._added += 1
            if self._added >= self._every:  # old accesses count less and less
                kept = {own: count >> 1 for own, count in self._counts.items() if count > 1}
                self._counts, self._added = Counter(kept), 0

    def count(self, key: KVKey) -> int:
        """Return the recent access count of a key."""
        return self._counts[hash(key)]

    def fit(self, held: int) -> None:
        """Remember more accesses for a tier that holds so many chunks."""
        self._every = max(LEAST_HALVED, SAMPLE * held)


class Capacity:
    """Keeps one tier, which may be without limit, within its capacity.

    The tier knows its chunks and evicts them; this class says which, and counts them. In its
    methods, ``by_last_use`` are the chunks that are not pinned and not the new one, the least
    recently used first; ``excess`` are the bytes that are too many with the new one; ``held`` is
    the number of chunks in the tier.
    """

    def __init__(self, policy: TierPolicy, counts: Counters) -> None:
        self._bytes, self._counts = policy.capacity_bytes, counts
        self._by_frequency = policy.admit == "frequency" and policy.capacity_bytes is not None
        self._sightings = Sightings()

    def see(self, keys: Iterable[KVKey]) -> None:
        """See ``Tier.see``."""
        if self._by_frequency:
            for key in keys:
                self._sightings.add(key)

    def excess(self, nbytes: int) -> int:
        """Return how many of so many bytes are too many; 0 or less if they fit."""
        return 0 if self._bytes is None else nbytes - self._bytes

    def check_fits(self, nbytes: int) -> None:
        """Raise RefusedError for a chunk that is larger than the capacity."""
        if self.excess(nbytes) > 0:
            raise RefusedError(f"{nbytes} bytes, capacity is {self._bytes}")

    def victims(
        self, key: KVKey, by_last_use: Iterable[Resident], *, excess: int, held: int
    ) -> list[KVKey]:
        """Return the chunks to evict so that a chunk fits.

        Raises RefusedError if too little can be evicted, RejectedError if it is not worth it.
        """
        if excess <= 0:
            return []
        self._sightings.fit(held)
        coldest = sorted(_looked_at(by_last_use, excess), key=self._seen)
        needed = _freeing(coldest, excess)
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
        return max(self._sightings.count(one.key), one.seen) if self._by_frequency else 0

    def _check_worth(self, key: KVKey, victims: Sequence[Resident]) -> None:
        """Reject a chunk that is not requested more often than the ones it would displace.

        Counts of 1 say nothing: among such chunks the newest is taken. For higher counts a
        difference of 1 is not enough: chunks of a loop differ by that, and each would displace the
        next.
        """
        own = self._sightings.count(key)
        total = sum(one.nbytes for one in victims)
        theirs = sum(self._seen(one) * one.nbytes for one in victims) / total if total else 0
        if own < theirs or 1 < theirs > own - 2:
            raise RejectedError(f"requested {own} times, the chunks to evict {theirs:g} times")


def _looked_at(by_last_use: Iterable[Resident], wanted: int) -> list[Resident]:
    """Return the first candidates, some more than needed for so many bytes."""
    order, looked = iter(by_last_use), list[Resident]()
    while wanted > 0 and (one := next(order, None)) is not None:
        looked.append(one)
        wanted -= one.nbytes
    return looked + list(islice(order, LOOKED_AT - 1))


def _freeing(order: Iterable[Resident], excess: int) -> list[Resident]:
    found = []
    for one in order:
        if excess <= 0:
            break
        found.append(one)
        excess -= one.nbytes
    return found
