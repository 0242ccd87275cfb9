"""Fetch: one prompt's chunks on their way from the store to whoever lays them into a buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from threading import Semaphore
from typing import Self

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.lookup import Lookup


@dataclass(frozen=True, slots=True)
class _Read:
    """A read that was begun. ahead: it holds a place in the room for reading ahead."""

    future: Future[Lookup]
    ahead: bool


class Fetch:
    """Chunks that are being read: begun at once, on the store's threads, handed out in order.

    Chunks are read ahead as far as there is room, which all fetches of a store share; the one that
    is to be handed out next is read in any case. Used by one thread at a time. Whoever does not
    take all of it closes it.
    """

    def __init__(
        self, keys: Iterable[KVKey], begin: Callable[[KVKey], Future[Lookup]], room: Semaphore
    ) -> None:
        self._waiting = deque(keys)
        self._reads: deque[_Read] = deque()
        self._begin, self._room = begin, room
        self._read_ahead()

    def __len__(self) -> int:
        """Chunks that are not handed out yet."""
        return len(self._waiting) + len(self._reads)

    def wait(self, seconds: float) -> bool:
        """Wait so long for the next chunk.

        Returns:
            Whether ``take`` will not have to wait, or nothing is left to take.
        """
        if not self:
            return True
        self._read_next()
        return bool(wait([self._reads[0].future], seconds).done)

    def take(self) -> Lookup:
        """Hand out the next chunk, once it is read.

        Returns:
            The chunk, or why there is none: also whether another model's KV of it is stored.

        Raises:
            IndexError: nothing is left.
        """
        self._read_next()
        read = self._reads.popleft()
        try:
            return read.future.result()
        except CancelledError:  # the store was closed meanwhile
            return Lookup.missed("store error")
        finally:
            self._leave(read)
            self._read_ahead()

    def close(self) -> None:
        """Give up what is not handed out: what has begun is read to its end and dropped."""
        self._waiting.clear()
        while self._reads:
            read = self._reads.popleft()
            read.future.cancel()
            self._leave(read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        while self._waiting and self._room.acquire(blocking=False):
            self._reads.append(_Read(self._begin(self._waiting.popleft()), ahead=True))

    def _read_next(self) -> None:
        """Read ahead; where others take all the room, at least what is to be handed out next."""
        self._read_ahead()
        if self._waiting and not self._reads:
            self._reads.append(_Read(self._begin(self._waiting.popleft()), ahead=False))

    def _leave(self, read: _Read) -> None:
        """Make room once a read's bytes are not held any more, at the end of the read at last."""
        if read.ahead:
            read.future.add_done_callback(lambda _: self._room.release())
