"""Writes the KV of prompt prefixes to the store, on a background thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.reading import Budget, Reservation
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.openmp import use_one_thread
from cacheblend_rag.prefill.prefix import block_kv

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 1 << 30
"""Most bytes of KV that may wait to be written; a single request may exceed it."""


class PrefixWriter:
    """Writes blocks of finished requests' KV; no request waits for it or fails with it.

    store: where they are kept, within its capacity. A request's blocks are dropped while too many
    bytes wait; the next request with the same prefix offers them again.
    """

    def __init__(self, store: TieredKVStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "cacheblend-prefix", initializer=use_one_thread)
        self._room = Budget(MOST_WAITING_BYTES)

    def put(self, keys: Sequence[KVKey], fused: FusedKV) -> None:
        """Queue those blocks of a request's prefix that are not stored yet.

        keys: of its blocks, in order. fused: the request's KV, which must not be written to any
        more.
        """
        room = self._taken_room(fused) if keys else None
        if room is None:
            return
        try:
            self._pool.submit(self._write, keys, [fused], room)
        except RuntimeError:  # closed meanwhile
            room.give_back()

    def drain(self) -> None:
        """Wait until all queued blocks are written."""
        self._pool.submit(int).result()

    def close(self) -> None:
        """Write all queued blocks, and end the thread."""
        self._pool.shutdown(wait=True)

    def _taken_room(self, fused: FusedKV) -> Reservation | None:
        nothing_waits = self._room.left >= MOST_WAITING_BYTES
        return self._room.take(fused.keys.nbytes + fused.values.nbytes, anyway=nothing_waits)

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
