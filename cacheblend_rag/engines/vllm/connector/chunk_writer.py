"""Writes new chunk KV to a store on a separate thread."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.openmp import use_one_thread
from cacheblend_rag.reason import Reason

MOST_WAITING = 8
"""Most chunks of one job that are computed but not written; they take memory."""
WAIT_SECONDS = 0.001


class ChunkWriter:
    """Writes one job's chunks, in order, on a thread; ranks wait for each other.

    results: after ``finish``, those of all chunks, in order. refused: how many were not stored, by
    reason; failed: how many of these because a tier failed.
    """

    def __init__(self, stack: DecoderStack, store: TieredKVStore) -> None:
        self._stack, self._store = stack, store
        self._thread = ThreadPoolExecutor(1, "kv-put", initializer=use_one_thread)
        self._puts: list[Future[PutResult]] = []
        self.results: list[PutResult] = []
        self.refused: Counter[Reason] = Counter()
        self.failed: Counter[Reason] = Counter()

    def put(self, key: KVKey, kv: ChunkKV) -> Steps[None]:
        """Queue a chunk; yields while too many wait."""
        self._puts.append(self._thread.submit(self._store.put, key, kv))
        yield from self._until_waiting(MOST_WAITING - 1)

    def finish(self) -> Steps[int]:
        """Wait for all chunks; returns how many are stored. Raises the errors of ``put``."""
        yield from self._until_waiting(0)
        self.close()
        results = self.results = [put.result() for put in self._puts]
        self.refused.update(put.refusal for put in results if put.refusal)
        self.failed.update(put.refusal for put in results if put.refusal and put.failure)
        return len(results) - self.refused.total()

    def close(self) -> None:
        """Accept no more chunks; queued ones are still written, without waiting."""
        self._thread.shutdown(wait=False)

    def _until_waiting(self, most: int) -> Steps[None]:
        """Yield until every rank has at most so many unwritten chunks."""
        while True:
            waiting = [put for put in self._puts if not put.done()]
            if len(waiting) > most:
                waiting = list(wait(waiting, WAIT_SECONDS).not_done)
            if all(on_all_ranks(self._stack, [len(waiting) <= most])):
                return
            yield
