"""Removes chunks that are expired or deleted, when they are found and in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from weakref import ReferenceType, ref

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.deletions import Deletions
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.opening import TierThreads
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers.base import Tier

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
"""How often a part of each near tier is searched for expired chunks."""
CLOCK_SKEW_SECONDS = 300.0
"""Tolerated clock difference between machines: chunks further in the future are expired."""


class Expiry:
    """Decides which copies are expired, or deleted while their tier failed, and removes them.

    tiers: each with its time to live. locks: held, one key at a time, while working on a chunk.
    threads: on which tiers are searched. deletions: those that wait for a tier. closing: ends the
    thread that sweeps.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        locks: KeyLocks,
        threads: TierThreads,
        deletions: Deletions,
        closing: threading.Event,
    ) -> None:
        self._tiers, self._locks, self._threads = tiers, locks, threads
        self._deletions, self._closing = deletions, closing
        self._swept_at = time.monotonic()
        self._has_thread, self._deleting = False, set[str]()
        if deletions or any(self._sweeps(tier) for tier in tiers):
            self._keep_sweeping()

    def is_past(self, tier: Tier, key: KVKey, written_at: float) -> bool:
        """Whether a copy has expired, or waits to be deleted.

        One without a time, or from the future, has expired, too.
        """
        if self._deletions and self._deletions.hides(tier.name, key, written_at):
            return True
        if tier.ttl_seconds is None:
            return False
        in_time = -CLOCK_SKEW_SECONDS <= time.time() - written_at <= tier.ttl_seconds
        return not in_time and not any(other.is_pinned(key) for other in self._tiers)

    def in_time(self, tier: Tier, key: KVKey, read: Read) -> Read:
        """Return what was read, or None for a chunk that is expired, which is removed.

        Under the chunk's lock.
        """
        if isinstance(read, StoredChunk) and self.is_past(tier, key, read.written_at):
            tier.expire(key)
            return None
        return read

    def remove_opened(self, tier: Tier, key: KVKey) -> None:
        """Remove a chunk that is expired by its own head, unless its lock is held."""
        with self._locks.tried(key) as is_held:
            if is_held:
                again = tier.open(key)  # under the lock: it may have been stored again meanwhile
                if isinstance(again, ChunkReader) and self.is_past(tier, key, again.written_at):
                    tier.expire(key)

    def remove_all(self) -> int:
        """Remove expired copies from all tiers, after waiting for their locks; returns how many."""
        removed = 0
        for tier in self._tiers:
            for key, entry in tier.all_entries():
                if self.is_past(tier, key, entry.written_at):
                    with self._locks.held(key):
                        removed += self._remove(tier, key)
        return removed

    def delete_later(self, tiers: Sequence[str], key: KVKey) -> bool:
        """Let tiers delete a chunk once they work again; returns as ``Deletions.add``."""
        is_noted = self._deletions.add(tiers, key, time.time())
        self._keep_sweeping()
        return is_noted

    def sweep_now_and_then(self) -> None:
        """Search a part of each near tier for expired chunks, on the tier's own threads.

        Deletions that wait are tried again there, too.
        """
        now = time.monotonic()
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        self._deletions.refresh()
        for tier in self._tiers:
            if self._sweeps(tier):
                self._threads.submit(tier.name, partial(self._sweep, tier))
            noted = self._deletions and self._deletions.of(tier.name)
            if noted and tier.name not in self._deleting and not tier.policy.read_only:
                self._deleting.add(tier.name)
                ends = self._threads.submit(tier.name, partial(self._delete, tier, noted))
                ends.add_done_callback(partial(self._ended, tier.name))

    def _remove(self, tier: Tier, key: KVKey) -> bool:
        entry: Entry | None = tier.entry(key)  # looked up again: it may have been stored again
        return entry is not None and self.is_past(tier, key, entry.written_at) and tier.expire(key)

    def _delete(self, tier: Tier, noted: Sequence[tuple[KVKey, float]]) -> None:
        """Delete copies that were to be deleted while the tier failed, until it fails again."""
        done = list[tuple[KVKey, float]]()
        for key, at in noted:
            with self._locks.held(key):
                entry = tier.entry(key)  # None if it cannot be told
                is_older = entry is None or entry.written_at <= at
                if is_older and tier.evict(key) is None:
                    break
            done.append((key, at))
        if done:
            self._deletions.remove(tier.name, done)
            logger.info("%s tier: %d deletions are carried out", tier.name, len(done))

    def _ended(self, tier: str, _: Future[None]) -> None:
        self._deleting.discard(tier)

    def _keep_sweeping(self) -> None:
        """Sweep on a separate thread until the store is closed or freed."""
        if self._has_thread:
            return
        told = (ref(self), self._closing)  # a weak reference, so that freeing the store ends it
        with suppress(RuntimeError):  # no thread left: sweep when the store is used
            Thread(target=_sweep_until, args=told, name="kv-sweep", daemon=True).start()
            self._has_thread = True

    def _sweeps(self, tier: Tier) -> bool:
        """Whether chunks of a tier expire and may be removed there."""
        return tier.ttl_seconds is not None and not tier.policy.read_only

    def _sweep(self, tier: Tier) -> None:
        for key, entry in tier.some_entries():
            if self.is_past(tier, key, entry.written_at):
                with self._locks.tried(key) as is_held:
                    if is_held:
                        self._remove(tier, key)


def _sweep_until(expiry: ReferenceType[Expiry], closing: threading.Event) -> None:
    """Sweep an unused store, until it is closed or freed."""
    while not closing.wait(SWEEP_SECONDS):
        there = expiry()
        if there is None:
            return
        there.sweep_now_and_then()
        del there
