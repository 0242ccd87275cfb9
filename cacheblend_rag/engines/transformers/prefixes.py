"""Stores what prompts begin with, on a thread of its own, after their answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.budget import Budget, Reservation
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.prefix import block_kv

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 1 << 30
"""KV of finished requests that waits to be stored, at most; of one request it may be more."""


class PrefixWriter:
    """Stores the blocks of finished requests; no request waits for it or fails with it.

    store: where they are kept, in its bounds. A request's blocks are dropped while too many wait:
    the next request that begins with them brings them again.
    """

    def __init__(self, store: TieredKVStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-prefix")
        self._room = Budget(MOST_WAITING_BYTES)

    def put(self, keys: Sequence[KVKey], fused: FusedKV) -> None:
        """Begin to store those of the first blocks of a prompt's KV that are not stored.

        fused: nobody writes to it any more.
        """
        nothing_waits = self._room.left >= MOST_WAITING_BYTES
        room = self._room.take(fused.keys.nbytes + fused.values.nbytes, anyway=nothing_waits)
        if not keys or room is None:
            return
        with suppress(RuntimeError):  # closed meanwhile
            self._pool.submit(self._write, keys, [fused], room)

    def drain(self) -> None:
        """Wait until everything has been stored that was put before."""
        self._pool.submit(int).result()

    def close(self) -> None:
        """Store what waits, and end the thread."""
        self._pool.shutdown(wait=True)

    def _write(self, keys: Sequence[KVKey], source: list[FusedKV], room: Reservation) -> None:
        """Copy the missing blocks and store them; only this frame holds the prompt's KV.

        Last ones first: if the store has no room for all, the first ones remain, without which no
        prompt would find the others.
        """
        try:
            fused = source.pop()
            held = self._store.contains_many(keys)
            missing = [index for index, is_held in enumerate(held) if not is_held][::-1]
            copies: Iterable[ChunkKV] = map(partial(block_kv, fused), missing)
            if fused.keys.device.type != "cpu":  # free the device's memory before a slow tier
                copies = list(copies)
            del fused
            for index, kv in zip(missing, copies, strict=True):
                self._store.put_computed(keys[index], kv)
        except Exception:
            logger.warning("what a prompt began with is not stored", exc_info=True)
        finally:
            room.give_back()
