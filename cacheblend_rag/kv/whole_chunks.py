"""Finds, reads and checks whole chunks, and loads them before they are requested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.expiry import Expiry
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.reading import keep_in
from cacheblend_rag.kv.stored_chunk import Entry, Lookup, miss_of
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.openmp import use_one_thread
from cacheblend_rag.reason import Miss


class WholeChunks:
    """Asks each tier once for all chunks that the tiers before it lack."""

    def __init__(self, tiers: Sequence[Tier], expiry: Expiry) -> None:
        self._tiers, self._expiry = tiers, expiry

    def held(self, keys: Iterable[KVKey]) -> dict[KVKey, Entry]:
        """Return the entries of those chunks that are stored."""
        missing, held = list(dict.fromkeys(keys)), dict[KVKey, Entry]()
        for tier in self._tiers:
            for key, entry in zip(missing, tier.entry_many(missing), strict=True):
                if entry is not None and not self._expiry.is_past(tier, key, entry.written_at):
                    held[key] = entry
            missing = [key for key in missing if key not in held]
        return held

    def get(self, key: KVKey, *, promote: bool) -> Lookup:
        """Read a chunk, under its lock.

        promote: whether it is kept in faster tiers.
        """
        found = Lookup(None, None, Miss.NOT_STORED)
        for depth, tier in enumerate(self._tiers):
            read = tier.get(key)
            if isinstance(read, StoreError):
                reason = miss_of(read)
                found = Lookup(None, tier.name if reason == Miss.STORE_ERROR else None, reason)
            elif read is not None and self._expiry.is_past(tier, key, read.written_at):
                tier.evict(key, "expired")
            elif read is not None:
                if promote:
                    keep_in(self._tiers[:depth], key, read)
                return Lookup(read.kv, tier.name, None)
        return found


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """One stored object that failed its check."""

    tier: str
    key: KVKey
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of verify. checked: objects read. expired: removed as expired."""

    checked: int
    expired: int
    damaged: tuple[DamagedObject, ...]


def read_through(
    tiers: Sequence[Tier],
    locks: KeyLocks,
    *,
    repair: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, tuple[DamagedObject, ...]]:
    """Read every object of the durable tiers; returns how many there were, and the damaged ones.

    locks: held, one key at a time. repair: whether damaged objects are quarantined. progress:
    called with the number of objects done and the total.
    """
    todo = [(tier, key) for tier in tiers if tier.durable for key, _ in tier.all_entries()]
    damaged = []
    for done, (tier, key) in enumerate(todo, start=1):
        with locks.held(key):
            reason = tier.check(key)
            if reason is not None and repair:
                tier.quarantine(key, reason)
        if reason is not None:
            damaged.append(DamagedObject(tier.name, key, reason))
        if progress is not None:
            progress(done, len(todo))
    return len(todo), tuple(damaged)


PREFETCH_THREADS = 2
ASKED_AT_ONCE = 64
"""Chunks that are looked up together before they are prefetched."""


class Prefetch:
    """Loads chunks on its own threads, as many as fit and as memory would keep.

    closing: set when the store is closed; then no new load begins.
    """

    def __init__(
        self, tiers: Sequence[Tier], chunks: WholeChunks, locks: KeyLocks, closing: threading.Event
    ) -> None:
        self._tiers, self._chunks, self._locks, self.closing = tiers, chunks, locks, closing
        self._pool = ThreadPoolExecutor(PREFETCH_THREADS, "kv-prefetch", initializer=use_one_thread)

    def submit(self, work: Callable[[], object]) -> None:
        """Run work in the background; skipped if the store is closed or no thread is left."""
        with suppress(RuntimeError):
            self._pool.submit(work)

    def begin(self, keys: Iterable[KVKey]) -> None:
        """Begin to load chunks, in their order, until the fastest tier has no room left."""
        fastest, room = self._tiers[0], self._tiers[0].capacity_bytes
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), ASKED_AT_ONCE):
            if self.closing.is_set():
                return
            some = wanted[start : start + ASKED_AT_ONCE]
            lacking = [key for key in some if not fastest.contains(key)]
            held = self._chunks.held(lacking)
            for key in lacking:
                entry = held.get(key)
                if entry is None or not self._is_kept(key, entry.nbytes):
                    continue
                if room is not None and (room := room - entry.nbytes) < 0:
                    return
                self.submit(partial(self._load, key))

    def close(self, *, cancel: bool = True) -> None:
        """Begin no new loads, and wait for running ones; cancel: drop waiting ones."""
        self._pool.shutdown(wait=True, cancel_futures=cancel)

    def _load(self, key: KVKey) -> None:
        """Read ahead of a request, which will be the chunk's use."""
        if not self._tiers[0].contains(key):
            with self._locks.held(key):
                self._chunks.get(key, promote=True)

    def _is_kept(self, key: KVKey, nbytes: int) -> bool:
        """Whether a memory tier without a chunk would keep it; True without memory tiers."""
        memory = [tier for tier in self._tiers if tier.keeps_found and not tier.durable]
        lacking = [tier for tier in memory if not tier.contains(key)]
        return not memory or any(tier.would_take(key, nbytes) for tier in lacking)
