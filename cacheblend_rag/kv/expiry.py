"""Removes expired chunks, when they are found and in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from weakref import ReferenceType, ref

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.opening import TierThreads
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers import Tier

SWEEP_SECONDS = 1.0
"""How often a part of each near tier is searched for expired chunks."""
CLOCK_SKEW_SECONDS = 300.0
"""Tolerated clock difference between machines: chunks further in the future are expired."""


class Expiry:
    """Decides which copies are expired, and removes them.

    tiers: each with its time to live. locks: held, one key at a time, while working on a chunk.
    threads: on which tiers are searched.
    """

    def __init__(self, tiers: Sequence[Tier], locks: KeyLocks, threads: TierThreads) -> None:
        self._tiers, self._locks, self._threads = tiers, locks, threads
        self._swept_at = time.monotonic()

    def is_past(self, tier: Tier, key: KVKey, written_at: float) -> bool:
        """Whether a chunk has expired; one without a time, or from the future, has, too."""
        if tier.ttl_seconds is None:
            return False
        in_time = -CLOCK_SKEW_SECONDS <= time.time() - written_at <= tier.ttl_seconds
        return not in_time and not any(other.is_pinned(key) for other in self._tiers)

    def in_time(self, tier: Tier, key: KVKey, read: Read) -> Read:
        """Return what was read, unless its signed time says that it is expired."""
        if isinstance(read, StoredChunk) and self.is_past(tier, key, read.written_at):
            tier.expire(key)
            return None
        return read

    def remove_from(self, tier: Tier, keys: Sequence[KVKey]) -> set[KVKey]:
        """Remove a tier's expired chunks; under their locks.

        Returns those that stay since the tier is read-only: they must not be used.
        """
        staying = set[KVKey]()
        if tier.ttl_seconds is not None:
            for key, entry in zip(keys, tier.entry_many(keys), strict=True):
                if entry is not None and self.is_past(tier, key, entry.written_at):
                    tier.expire(key)
                    staying |= {key} if tier.policy.read_only else set()
        return staying

    def remove(self, tier: Tier, key: KVKey) -> bool:
        """Remove a chunk if it is expired, after waiting for its lock."""
        with self._locks.held(key):
            return self._remove(tier, key)

    def remove_if_free(self, tier: Tier, key: KVKey) -> None:
        """As remove, unless the chunk's lock is held."""
        with self._locks.tried(key) as is_held:
            if is_held:
                self._remove(tier, key)

    def remove_opened(self, tier: Tier, key: KVKey) -> None:
        """As remove_if_free, for a chunk that is expired by its own head."""
        with self._locks.tried(key) as is_held:
            if is_held:
                again = tier.open(key)  # under the lock: it may have been stored again meanwhile
                if isinstance(again, ChunkReader) and self.is_past(tier, key, again.written_at):
                    tier.expire(key)

    def remove_all(self) -> int:
        """Remove expired copies from all tiers; returns how many."""
        return sum(
            self.remove(tier, key)
            for tier in self._tiers
            for key, entry in tier.all_entries()
            if self.is_past(tier, key, entry.written_at)
        )

    def keep_sweeping(self, closing: threading.Event) -> None:
        """Sweep on a separate thread until the store is closed or freed."""
        if any(self._sweeps(tier) for tier in self._tiers):
            told = (ref(self), closing)  # a weak reference, so that freeing the store ends it
            with suppress(RuntimeError):  # no thread left: sweep when the store is used
                Thread(target=_sweep_until, args=told, name="kv-sweep", daemon=True).start()

    def sweep_now_and_then(self) -> None:
        """Search a part of each near tier for expired chunks, on the tier's own threads."""
        now = time.monotonic()
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        for tier in self._tiers:
            if self._sweeps(tier):
                self._threads.submit(tier.name, partial(self._sweep, tier))

    def _remove(self, tier: Tier, key: KVKey) -> bool:
        entry: Entry | None = tier.entry(key)  # looked up again: it may have been stored again
        return entry is not None and self.is_past(tier, key, entry.written_at) and tier.expire(key)

    def _sweeps(self, tier: Tier) -> bool:
        """Whether chunks of a tier expire and may be removed there."""
        return tier.ttl_seconds is not None and not tier.policy.read_only

    def _sweep(self, tier: Tier) -> None:
        for key, entry in tier.some_entries():
            if self.is_past(tier, key, entry.written_at):
                self.remove_if_free(tier, key)


def _sweep_until(expiry: ReferenceType[Expiry], closing: threading.Event) -> None:
    """Sweep an unused store, until it is closed or freed."""
    while not closing.wait(SWEEP_SECONDS):
        there = expiry()
        if there is None:
            return
        there.sweep_now_and_then()
        del there
