"""TieredKVStore: chunk KV in several tiers, fastest first, looked up and stored as one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError, StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.tiers import DiskTier, Entry, HostTier, StoredChunk, Tier

StoreMiss = Literal["not stored", "damaged", "other model", "store error"]

PREFETCH_THREADS = 2
CLOCK_SKEW_SECONDS = 300.0
"""How far machines' clocks may lie apart: what is written later than that is expired, too."""
_STRIPES = 256


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a get found: the chunk KV and its tier's name, or the reason why there is none."""

    kv: ChunkKV | None
    tier: str | None
    reason: StoreMiss | None


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """One stored object that failed its check."""

    tier: str
    key: KVKey
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify did. checked: objects read. expired: removed as past their time to live."""

    checked: int
    expired: int
    damaged: tuple[DamagedObject, ...]


class TieredKVStore:
    """Chunk KV under keys, over tiers from fastest to slowest. Safe to share between threads.

    A get tries the tiers in order; a put writes to all of them. No method that a request needs
    raises because of storage: damage, a full disk or a foreign file is a miss or a failed put.

    ttl_seconds: age since it was first stored at which a chunk is gone, None is never. Pins hold
    in this process: they exempt a chunk from eviction by capacity and by age.
    """

    def __init__(self, tiers: Sequence[Tier], *, ttl_seconds: float | None = None) -> None:
        if not tiers:
            raise StoreError("a store needs at least one tier")
        names = [tier.name for tier in tiers]
        if len(set(names)) != len(names):
            raise StoreError(f"tiers {', '.join(names)} must have names of their own")
        if ttl_seconds is not None and ttl_seconds <= 0:
            raise StoreError(f"ttl_seconds={ttl_seconds} must be above 0")
        self.tiers = tuple(tiers)
        self.ttl_seconds = ttl_seconds
        self._pinned: set[KVKey] = set()
        self._locks = [threading.Lock() for _ in range(_STRIPES)]
        self._pool = ThreadPoolExecutor(PREFETCH_THREADS, thread_name_prefix="kv-prefetch")

    @classmethod
    def open(
        cls,
        *,
        host_bytes: int | None = 4 << 30,
        disk_path: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        ttl_seconds: float | None = None,
    ) -> TieredKVStore:
        """Return a store in memory, on disk, or both.

        host_bytes: memory for chunk KV; None is without limit, 0 keeps nothing in memory.
        disk_path: folder shared between processes and runs; None keeps nothing on disk.
        disk_bytes: room for chunk KV there; None is without limit.

        Raises StoreError when there is neither memory nor disk, or the folder is unusable.
        """
        tiers: list[Tier] = []
        if host_bytes != 0:
            tiers.append(HostTier(host_bytes))
        if disk_path is not None:
            tiers.append(DiskTier(disk_path, disk_bytes))
        return cls(tiers, ttl_seconds=ttl_seconds)

    def contains(self, key: KVKey) -> bool:
        """Whether any tier holds the chunk; reads no tensors."""
        return self._entry(key) is not None

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace."""
        return any(tier.has_relative(key) for tier in self.tiers)

    def contains_many(self, keys: Iterable[KVKey]) -> list[bool]:
        """As contains, for many keys at once, in their order."""
        return [self.contains(key) for key in keys]

    def nbytes(self, key: KVKey) -> int | None:
        """Return a chunk's stored size in its fastest tier, None when it is not stored."""
        entry = self._entry(key)
        return None if entry is None else entry.nbytes

    def get(self, key: KVKey, *, promote: bool = True) -> Lookup:
        """Read one chunk from the fastest tier that has it; the tensors must not be written to.

        promote: keep a copy found lower down in the fastest tier; without it nothing is retained.
        """
        with self._locked(key):
            return self._get(key, promote)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Store a chunk in every tier that takes it, fastest first; returns whether any did.

        Raises ValueError when the tensors are not as ChunkKV promises.
        """
        kv.validate()
        chunk = StoredChunk(kv, time.time())
        with self._locked(key):
            return _put_all(self.tiers, key, chunk)

    def evict(self, key: KVKey) -> bool:
        """Remove a chunk from all tiers, pinned or not; returns whether it was stored."""
        with self._locked(key):
            evicted = [tier.evict(key) for tier in self.tiers]
        return any(evicted)

    def evict_where(self, condition: Callable[[KVKey, Entry], bool]) -> int:
        """Evict all chunks for which ``condition`` holds; returns how many."""
        doomed = [key for key, entry in self.entries().items() if condition(key, entry)]
        return sum(self.evict(key) for key in doomed)

    def evict_expired(self) -> int:
        """Remove the copies past their time to live from all tiers; returns how many."""
        return sum(
            self._expire(tier, key)
            for tier in self.tiers
            for key, entry in tier.entries()
            if self._is_expired(key, entry)
        )

    def pin(self, key: KVKey) -> None:
        """Never evict this chunk for capacity or age, from now on, stored yet or not."""
        self._pinned.add(key)
        for tier in self.tiers:
            tier.pin(key)

    def unpin(self, key: KVKey) -> None:
        """Undo pin."""
        self._pinned.discard(key)
        for tier in self.tiers:
            tier.unpin(key)

    def promote(self, key: KVKey) -> bool:
        """Bring a chunk into the fastest tier; returns whether it is there now."""
        with self._locked(key):
            self._get(key, promote=True)
            return self.tiers[0].contains(key)

    def demote(self, key: KVKey) -> bool:
        """Drop a chunk from the fastest tier, storing it below first where it is not.

        Returns whether it is below and no longer in the fastest tier; a chunk that no lower tier
        takes stays where it is.
        """
        fastest, lower = self.tiers[0], self.tiers[1:]
        with self._locked(key):
            if not any(tier.contains(key) for tier in lower):
                found = self._read(fastest, key)
                if found is None or not _put_all(lower, key, found):
                    return False
            fastest.evict(key)
            return True

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Start loading chunks into the fastest tier, as many as fit; returns at once.

        A get for one of them waits for its load rather than loading it again.
        """
        fastest, room = self.tiers[0], self.tiers[0].capacity_bytes
        for key in dict.fromkeys(keys):
            entry = None if fastest.contains(key) else self._entry(key)
            if entry is None:
                continue
            if room is not None and (room := room - entry.nbytes) < 0:
                return
            self._pool.submit(self._prefetch, key)

    def keys(self) -> list[KVKey]:
        """Return the keys of all chunks stored in any tier."""
        return list(self.entries())

    def entries(self) -> dict[KVKey, Entry]:
        """Return what is known of each stored chunk, from the fastest tier that holds it."""
        return {
            key: entry
            for tier in reversed(self.tiers)
            for key, entry in tier.entries()
            if not self._is_expired(key, entry)
        }

    def stats(self) -> dict[str, dict[str, int | None]]:
        """Return by tier: entries, bytes, capacity_bytes, and this process's hits, misses,
        evictions, expired, quarantined, refused, errors.
        """
        return {tier.name: tier.stats() for tier in self.tiers}

    def verify(
        self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read every object in durable tiers through, after removing expired ones.

        repair: quarantine what is damaged. progress: called with objects done and in all.
        """
        expired = self.evict_expired()
        durable = [tier for tier in self.tiers if tier.durable]
        todo = [(tier, key) for tier in durable for key, _ in tier.entries()]
        damaged = []
        for done, (tier, key) in enumerate(todo, start=1):
            with self._locked(key):
                reason = tier.check(key)
                if reason is not None and repair:
                    tier.quarantine(key, reason)
            if reason is not None:
                damaged.append(DamagedObject(tier.name, key, reason))
            if progress is not None:
                progress(done, len(todo))
        return VerifyReport(len(todo), expired, tuple(damaged))

    def close(self) -> None:
        """Stop prefetching and let go of memory; the store must not be used afterwards."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _locked(self, key: KVKey) -> Iterator[None]:
        """One thread at a time for one chunk: no double load, no promotion past an eviction."""
        with self._locks[hash(key) % _STRIPES]:
            yield

    def _entry(self, key: KVKey) -> Entry | None:
        for tier in self.tiers:
            entry = tier.entry(key)
            if entry is not None and not self._is_expired(key, entry):
                return entry
        return None

    def _is_expired(self, key: KVKey, entry: Entry) -> bool:
        if self.ttl_seconds is None or key in self._pinned:
            return False
        age = time.time() - entry.written_at
        return age > self.ttl_seconds or age < -CLOCK_SKEW_SECONDS

    def _expire(self, tier: Tier, key: KVKey) -> bool:
        with self._locked(key):
            entry = tier.entry(key)  # looked up again: it may have been stored anew
            return entry is not None and self._is_expired(key, entry) and tier.expire(key)

    def _get(self, key: KVKey, promote: bool) -> Lookup:
        reason: StoreMiss = "not stored"
        for tier in self.tiers:
            try:
                found = self._read(tier, key)
            except ForeignChunkError:
                reason = "other model"
            except DamagedChunkError:
                reason = "damaged"
            except StoreError:
                reason = "store error"
            else:
                if found is None:
                    continue
                if promote and tier is not self.tiers[0]:
                    self.tiers[0].put(key, found)
                return Lookup(found.kv, tier.name, None)
        return Lookup(None, None, reason)

    def _read(self, tier: Tier, key: KVKey) -> StoredChunk | None:
        if self.ttl_seconds is not None:
            entry = tier.entry(key)
            if entry is not None and self._is_expired(key, entry):
                tier.expire(key)
        return tier.get(key)

    def _prefetch(self, key: KVKey) -> None:
        if not self.tiers[0].contains(key):
            self.get(key)


def _put_all(tiers: Sequence[Tier], key: KVKey, chunk: StoredChunk) -> bool:
    """Store a chunk in every tier that takes it; returns whether any did."""
    taken = [tier.put(key, chunk) for tier in tiers]
    return any(taken)
