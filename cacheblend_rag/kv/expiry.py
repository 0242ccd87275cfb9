"""Removes chunks that are expired or deleted, when they are found and in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import Event, Thread
from weakref import ReferenceType, ref

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.deletions import Deletions
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.tiers.base import Tier

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
"""How often a part of each tier is searched for expired chunks."""
CLOCK_SKEW_SECONDS = 300.0
"""Tolerated clock difference between machines: chunks further in the future are expired."""


class Expiry:
    """Decides which copies are expired, or deleted while their tier failed, and removes them.

    Each tier has a thread that sweeps it about once a second, until the store is closed or freed,
    so that a tier that hangs delays no other.

    tiers: each with its time to live. locks: held, one key at a time, while working on a chunk.
    deletions: those that wait for a tier. closing: ends the threads.
    """

    def __init__(
        self, tiers: Sequence[Tier], locks: KeyLocks, deletions: Deletions, closing: Event
    ) -> None:
        self._tiers, self._locks = tiers, locks
        self._deletions, self._closing = deletions, closing
        # a weak reference, so that freeing the store ends them
        self._threads = [
            Thread(
                target=_sweep_until, args=(ref(self), index, closing), name="kv-sweep", daemon=True
            )
            for index in range(len(tiers))
        ]
        for thread in self._threads:
            thread.start()

    def is_past(self, tier: Tier, key: KVKey, written_at: float) -> bool:
        """Whether a copy has expired, or waits to be deleted.

        One without a time, or from the future, has expired, too.
        """
        if self._deletions.hides(tier.name, key, written_at):
            return True
        if tier.ttl_seconds is None:
            return False
        in_time = -CLOCK_SKEW_SECONDS <= time.time() - written_at <= tier.ttl_seconds
        return not in_time and not any(other.is_pinned(key) for other in self._tiers)

    def remove_opened(self, tier: Tier, key: KVKey) -> None:
        """Remove a chunk that is expired by its own head, unless its lock is held."""
        with self._locks.tried(key) as is_held:
            if is_held:
                again = tier.open(key)  # under the lock: it may have been stored again meanwhile
                if isinstance(again, ChunkReader) and self.is_past(tier, key, again.written_at):
                    tier.evict(key, "expired")

    def remove_all(self) -> int:
        """Remove expired copies from all tiers, after waiting for their locks; returns how many."""
        removed = 0
        for tier in self._tiers:
            for key, entry in tier.all_entries():
                if self.is_past(tier, key, entry.written_at):
                    with self._locks.held(key):
                        removed += self._remove(tier, key)
        return removed

    def close(self) -> None:
        """Wait for the threads to end, once ``closing`` is set."""
        for thread in self._threads:
            thread.join()

    def sweep(self, index: int) -> None:
        """Remove expired chunks from a part of a tier, and try the deletions that wait for it."""
        tier = self._tiers[index]
        self._deletions.refresh()
        if tier.policy.read_only:
            return
        if tier.ttl_seconds is not None:
            for key, entry in tier.some_entries():
                if self.is_past(tier, key, entry.written_at):
                    with self._locks.tried(key) as is_held:
                        if is_held:
                            self._remove(tier, key)
        self._delete(tier)

    def _remove(self, tier: Tier, key: KVKey) -> bool:
        entry = tier.entry(key)  # looked up again: it may have been stored again
        is_past = entry is not None and self.is_past(tier, key, entry.written_at)
        return is_past and bool(tier.evict(key, "expired"))

    def _delete(self, tier: Tier) -> None:
        """Delete copies that were to be deleted while the tier failed, until it fails again."""
        done = list[tuple[KVKey, float]]()
        for key, at in self._deletions.of(tier.name):
            with self._locks.held(key):
                entry = tier.entry(key)  # None if it cannot be told
                is_older = entry is None or entry.written_at <= at
                if self._closing.is_set() or (is_older and tier.evict(key) is None):
                    break
            done.append((key, at))
        if done:
            self._deletions.remove(tier.name, done)
            logger.info("%s tier: %d deletions are carried out", tier.name, len(done))


def _sweep_until(expiry: ReferenceType[Expiry], index: int, closing: Event) -> None:
    while not closing.wait(SWEEP_SECONDS) and (there := expiry()) is not None:
        try:
            there.sweep(index)
        except Exception:  # of a tier of a user's own
            logger.warning("chunks are not swept", exc_info=True)
        del there
