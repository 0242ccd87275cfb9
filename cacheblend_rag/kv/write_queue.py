"""A write-behind queue, from which a thread writes chunks to a tier."""

from __future__ import annotations

import logging
import threading
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.compact import compact
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.openmp import use_one_thread

logger = logging.getLogger(__name__)

ROOM_BYTES = 256 << 20
"""Limit of the queue in bytes, and so of the loss if the process is killed."""
DRAIN_SECONDS = 60.0


class WriteQueue:
    """Chunks are held in memory until they are written, oldest first; a newer one replaces them.

    The thread lives while there is something to write; the interpreter waits for it at its end.
    """

    def __init__(self, write: Callable[[KVKey, StoredChunk], object], name: str) -> None:
        self._write, self._name = write, name
        self._reset()

    def after_fork(self) -> None:
        """Start empty in a forked process: its parent writes what is queued."""
        self._reset()

    def _reset(self) -> None:
        self._waiting: OrderedDict[KVKey, StoredChunk] = OrderedDict()
        self._in_hand: tuple[KVKey, StoredChunk] | None = None
        self._nbytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_open = True

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting) + (self._in_hand is not None)

    def add(self, key: KVKey, chunk: StoredChunk) -> str | None:
        """Queue a chunk; returns why it was not queued, None if it was.

        A chunk larger than the limit is accepted if nothing else waits. If no thread can be
        started, the chunk is not queued, and the next one tries to start a thread again.
        """
        chunk = replace(chunk, kv=compact(chunk.kv))
        with self._changed:
            older = self._waiting.get(key)
            nbytes = self._nbytes + chunk.kv.nbytes - (older.kv.nbytes if older else 0)
            if not self._is_open:
                return "the store is closed"
            if self._nbytes and nbytes > ROOM_BYTES:
                return "the write queue is full"
            if self._thread is None and (refusal := self._start()) is not None:
                return refusal
            self._waiting[key], self._nbytes = chunk, nbytes
        return None

    def _start(self) -> str | None:
        """Start the thread, under the lock; returns why it cannot be started."""
        thread = threading.Thread(target=self._run, name=f"kv-write-{self._name}")
        try:
            thread.start()
        except RuntimeError as error:
            return f"no thread to write it: {error}"
        finally:
            if thread.ident is not None:  # also if the wait for its start was interrupted
                self._thread = thread
        return None

    def of(self, keys: Iterable[KVKey]) -> dict[KVKey, StoredChunk]:
        """Return those of some chunks that are not written yet, or are just being written."""
        with self._changed:
            queued = self._queued()
            return {key: queued[key] for key in keys if key in queued} if queued else {}

    def all(self) -> dict[KVKey, StoredChunk]:
        """Return all chunks that are not written yet, the next one to be written first."""
        with self._changed:
            return dict(self._queued())

    def _queued(self) -> ChainMap[KVKey, StoredChunk]:
        """As all, without a copy, under the lock; of two chunks with one key, the newer one."""
        return ChainMap(self._waiting, dict([self._in_hand] if self._in_hand else []))

    def take_back(self, key: KVKey) -> bool:
        """Remove a chunk from the queue; returns whether it was there.

        Waits if the chunk is just being written, so that a later removal from the tier is final.
        """
        with self._changed:
            older = self._waiting.pop(key, None)
            self._nbytes -= older.kv.nbytes if older else 0
            self._changed.wait_for(lambda: not self._in_hand or self._in_hand[0] != key)
        return older is not None

    def close(self) -> tuple[int, int]:
        """Accept no more chunks, and wait at most DRAIN_SECONDS for the queue to be written.

        Returns the number and bytes of chunks that were lost.
        """
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: self._thread is None, DRAIN_SECONDS)
            lost = len(self._waiting), sum(one.kv.nbytes for one in self._waiting.values())
            self._waiting.clear()
        return lost

    def _run(self) -> None:
        use_one_thread()
        while (taken := self._take()) is not None:
            try:
                self._write(*taken)
            except BaseException:  # of one chunk: the thread continues with the others
                logger.exception("%s tier: %s is not stored", self._name, taken[0])
            finally:
                with self._changed:
                    self._in_hand = None
                    self._nbytes -= taken[1].kv.nbytes
                    self._changed.notify_all()

    def _take(self) -> tuple[KVKey, StoredChunk] | None:
        with self._changed:
            if self._thread is not threading.current_thread():
                return None  # its start was interrupted: another thread has started, or will
            if not self._waiting:
                self._thread = None
                self._changed.notify_all()
                return None
            self._in_hand = self._waiting.popitem(last=False)
            return self._in_hand
