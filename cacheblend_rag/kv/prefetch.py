"""Loads chunks into the fastest tier in the background, before they are requested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.tiers import Tier
from cacheblend_rag.kv.whole_chunks import WholeChunks
from cacheblend_rag.openmp import use_one_thread

PREFETCH_THREADS = 2
ASKED_AT_ONCE = 64
"""Chunks that are looked up together before they are prefetched."""


class Prefetch:
    """Loads chunks on its own threads, as many as fit and as memory would keep.

    closing: set when the store is closed; then no new load begins.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        chunks: WholeChunks,
        locks: KeyLocks,
        closing: threading.Event,
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
                self._chunks.get_many([key], promote=True)

    def _is_kept(self, key: KVKey, nbytes: int) -> bool:
        """Whether a memory tier without a chunk would keep it; True without memory tiers."""
        memory = [tier for tier in self._tiers if tier.keeps_found and not tier.durable]
        lacking = [tier for tier in memory if not tier.contains(key)]
        return not memory or any(tier.would_take(key, nbytes) for tier in lacking)
