"""Stores what prompts begin with, on a thread of its own, after their answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.prefix import block_kv

logger = logging.getLogger(__name__)

MOST_WAITING = 4
"""Answers whose prefixes wait to be stored, at most: each keeps its prompt's KV in memory."""


class PrefixWriter:
    """Stores the blocks of finished requests; no request waits for it or fails with it.

    store: where they are kept, in its bounds. A request's blocks are dropped while too many wait:
    the next request that begins with them brings them again.
    """

    def __init__(self, store: TieredKVStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-prefix")
        self._places = BoundedSemaphore(MOST_WAITING)

    def put(self, keys: Sequence[KVKey], fused: FusedKV) -> None:
        """Begin to store those of the first blocks of a prompt's KV that are not stored.

        fused: nobody writes to it any more.
        """
        if not keys or not self._places.acquire(blocking=False):
            return
        try:
            self._pool.submit(self._write, keys, [fused])
        except RuntimeError:  # closed meanwhile
            self._places.release()

    def drain(self) -> None:
        """Wait until everything has been stored that was put before."""
        self._pool.submit(int).result()

    def close(self) -> None:
        """Store what waits, and end the thread."""
        self._pool.shutdown(wait=True)

    def _write(self, keys: Sequence[KVKey], source: list[FusedKV]) -> None:
        """Copy the missing blocks, let go of the prompt's KV, then store them, first ones first.

        source: the KV alone; it is taken out, so that nothing else holds it.
        """
        try:
            fused = source.pop()
            held = self._store.contains_many(keys)
            missing = [index for index, is_held in enumerate(held) if not is_held]
            copies = [(keys[index], block_kv(fused, index)) for index in missing]
            del fused
            for key, kv in copies:
                self._store.put_computed(key, kv)
        except Exception:
            logger.warning("what a prompt began with is not stored", exc_info=True)
        finally:
            self._places.release()
