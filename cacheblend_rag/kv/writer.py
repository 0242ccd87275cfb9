"""Writes KV to a store on a thread of its own, in order: who computes it goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cacheblend_rag.kv.reading import Budget
from cacheblend_rag.openmp import use_one_thread

T = TypeVar("T")
MOST_WAITING_BYTES = 1 << 30
"""Most bytes of KV that may wait to be written; a single write may exceed it."""


class Writer:
    """Writes one after the other, on a thread; counts the bytes that wait.

    It refuses nothing for lack of room: who has more to write asks ``has_room`` first, and waits or
    drops it.
    """

    def __init__(self, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._most, self._room = most_bytes, Budget(most_bytes)
        self._thread = ThreadPoolExecutor(1, "kv-write", initializer=use_one_thread)

    def has_room(self, nbytes: int = 1) -> bool:
        """Whether so many more bytes may wait; always if nothing does."""
        left = self._room.left
        return nbytes <= left or left == self._most

    def submit(self, nbytes: int, write: Callable[[], T]) -> Future[T]:
        """Queue a write, which has so many bytes in memory until it is done.

        Raises:
            RuntimeError: when the writer is closed, or no thread can be started.
        """
        room = self._room.take(nbytes, anyway=True)
        done = self._thread.submit(write)
        if room is not None:
            done.add_done_callback(room.give_back)
        return done

    def drain(self) -> None:
        """Wait until all queued writes are done."""
        self._thread.submit(int).result()

    def close(self, *, wait: bool) -> None:
        """Accept no more writes; queued ones are done, in the background unless waited for."""
        self._thread.shutdown(wait=wait)
