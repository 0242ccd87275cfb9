"""Removes chunks that are past their time to live, when they are met and while nobody asks."""

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
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers import Tier

SWEEP_SECONDS = 1.0
"""How often a part of each near tier is looked through for what is past its time."""
CLOCK_SKEW_SECONDS = 300.0
"""Tolerated clock difference between machines: chunks further in the future are expired."""


class Expiry:
    """Says which copies are past their time, and removes them.

    tiers: each with the age at which its copies are gone. locks: held, a key at a time, by whoever
    works on a chunk. threads: where tiers are looked through.
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
        """Return what was read, unless its sealed time says that it is past it."""
        if isinstance(read, StoredChunk) and self.is_past(tier, key, read.written_at):
            tier.expire(key)
            return None
        return read

    def remove_from(self, tier: Tier, keys: Sequence[KVKey]) -> set[KVKey]:
        """Remove those of a tier's chunks that are past their time; under their locks.

        Returns those that stay there, since the tier is only read: they are not to be read.
        """
        staying = set[KVKey]()
        if tier.ttl_seconds is not None:
            for key, entry in zip(keys, tier.entry_many(keys), strict=True):
                if entry is not None and self.is_past(tier, key, entry.written_at):
                    tier.expire(key)
                    staying |= {key} if tier.policy.read_only else set()
        return staying

    def remove(self, tier: Tier, key: KVKey) -> bool:
        """Remove a chunk if it is past its time, after waiting for whoever is at work on it."""
        with self._locks.held(key):
            return self._remove(tier, key)

    def remove_if_free(self, tier: Tier, key: KVKey) -> None:
        """As remove, unless somebody is at work on the chunk just now."""
        with self._locks.tried(key) as is_held:
            if is_held:
                self._remove(tier, key)

    def remove_opened(self, tier: Tier, key: KVKey) -> None:
        """As remove_if_free, for a chunk whose own head said so, whatever the tier says."""
        with self._locks.tried(key) as is_held:
            if is_held:
                tier.expire(key)

    def remove_all(self) -> int:
        """Go through all tiers and remove what is past its time; returns how many copies."""
        return sum(
            self.remove(tier, key)
            for tier in self._tiers
            for key, entry in tier.all_entries()
            if self.is_past(tier, key, entry.written_at)
        )

    def keep_sweeping(self, closing: threading.Event) -> None:
        """Sweep on a thread of its own until the store is closed, or gone."""
        if any(self._sweeps(tier) for tier in self._tiers):
            told = (ref(self), closing)  # a weak reference: a store that is dropped ends it
            with suppress(RuntimeError):  # the system has no thread left: swept when it is used
                Thread(target=_sweep_until, args=told, name="kv-sweep", daemon=True).start()

    def sweep_now_and_then(self) -> None:
        """Have a part of each near tier looked through, on its own threads, for what is expired."""
        now = time.monotonic()
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        for tier in self._tiers:
            if self._sweeps(tier):
                self._threads.submit(tier.name, partial(self._sweep, tier))

    def _remove(self, tier: Tier, key: KVKey) -> bool:
        entry: Entry | None = tier.entry(key)  # looked up again: it may have been stored anew
        return entry is not None and self.is_past(tier, key, entry.written_at) and tier.expire(key)

    def _sweeps(self, tier: Tier) -> bool:
        """Whether what is in a tier expires, and may be removed there."""
        return tier.ttl_seconds is not None and not tier.policy.read_only

    def _sweep(self, tier: Tier) -> None:
        for key, entry in tier.some_entries():
            if self.is_past(tier, key, entry.written_at):
                self.remove_if_free(tier, key)


def _sweep_until(expiry: ReferenceType[Expiry], closing: threading.Event) -> None:
    """Sweep a store that nobody uses, until it is closed, or gone."""
    while not closing.wait(SWEEP_SECONDS):
        there = expiry()
        if there is None:
            return
        there.sweep_now_and_then()
        del there
