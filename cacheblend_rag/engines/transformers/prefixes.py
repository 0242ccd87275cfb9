"""Looks up and stores the KV of what prompts begin with, on threads beside the model's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.reading import Budget, Reservation
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.openmp import use_one_thread
from cacheblend_rag.prefill.prefix import PrefixKeys, StoredPrefix, block_kv

logger = logging.getLogger(__name__)

LOOKUP_THREADS = 32
"""The prefixes of so many prompts are looked up at the same time."""
MOST_WAITING_BYTES = 1 << 30
"""Most bytes of KV that may wait to be written; a single request may exceed it."""


class Prefixes:
    """The stored blocks of prompts' prefixes; no request waits for a write, or fails with one.

    store: where they are kept, within its capacity. namespace: whose prompts share them. A
    request's blocks are dropped while too many bytes wait; the next request with the same prefix
    offers them again.
    """

    def __init__(self, store: TieredKVStore, namespace: str) -> None:
        self._store, self._namespace = store, namespace
        self._lookups = ThreadPoolExecutor(LOOKUP_THREADS, "cacheblend-lookup")
        self._writer = ThreadPoolExecutor(1, "cacheblend-prefix", initializer=use_one_thread)
        self._room = Budget(MOST_WAITING_BYTES)

    def keys(self, identity: Mapping[str, Any], salt: str | None) -> PrefixKeys | None:
        """Return what makes the keys of a prompt's blocks; None if stored KV is not exact.

        identity: all that the model's KV depends on. salt: of prompts that share blocks with those
        of the same one alone.
        """
        if self._store.precision != "native":
            return None
        return PrefixKeys.of(identity, self._namespace).salted(salt)

    def find(self, keys: Sequence[KVKey]) -> Future[StoredPrefix] | None:
        """Look up a prompt's blocks, in order; None once the interpreter ends."""
        try:
            return self._lookups.submit(StoredPrefix.find, self._store, keys)
        except RuntimeError:
            return None

    def put(self, keys: Sequence[KVKey], fused: FusedKV) -> None:
        """Queue those blocks of a request's prefix that are not stored yet.

        keys: of its blocks, in order. fused: the request's KV, which must not be written to any
        more.
        """
        size = fused.keys.nbytes + fused.values.nbytes
        nothing_waits = self._room.left >= MOST_WAITING_BYTES
        room = self._room.take(size, anyway=nothing_waits) if keys else None
        if room is None:
            return
        try:
            self._writer.submit(self._write, keys, [fused], room)
        except RuntimeError:  # closed meanwhile
            room.give_back()

    def drain(self) -> None:
        """Wait until all queued blocks are written."""
        self._writer.submit(int).result()

    def close(self) -> None:
        """Write all queued blocks, and end the threads."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def _write(self, keys: Sequence[KVKey], source: list[FusedKV], room: Reservation) -> None:
        """Copy the missing blocks and store them; only this frame references the request's KV.

        The last block is stored first: if the store evicts the oldest ones, the first blocks stay,
        without which the later ones would not be found.
        """
        try:
            fused = source.pop()
            held = self._store.contains_many(keys)
            missing = [block for block in reversed(range(len(keys))) if not held[block]]
            copies: Iterable[ChunkKV] = (block_kv(fused, block) for block in missing)
            if fused.keys.device.type != "cpu":  # free the device's memory before a slow tier
                copies = list(copies)
                del fused
            for block, kv in zip(missing, copies, strict=True):
                self._store.put_computed(keys[block], kv)
        except Exception:
            logger.warning("the KV of a prompt's prefix is not stored", exc_info=True)
        finally:
            room.give_back()
