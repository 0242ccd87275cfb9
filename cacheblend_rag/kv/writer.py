"""Writes KV to a store in the background, in order, while its caller goes on computing."""

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
    """Runs writes one after another on one thread, and counts the bytes that wait.

    ``submit`` accepts any write: a caller asks ``has_room`` before, and waits or drops its data.
    """

    def __init__(self, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._most, self._room = most_bytes, Budget(most_bytes)
        self._thread = ThreadPoolExecutor(1, "kv-write", initializer=use_one_thread)

    def has_room(self, nbytes: int = 1) -> bool:
        """Whether ``nbytes`` more may wait; always true if nothing waits."""
        left = self._room.left
        return nbytes <= left or left == self._most

    def submit(self, nbytes: int, write: Callable[[], T]) -> Future[T]:
        """Queue a write, whose data takes ``nbytes`` of memory until it is done.

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
        """Accept no more writes; queued ones are still done. wait: return once they are."""
        self._thread.shutdown(wait=wait)
