"""Keeps what was read of chunks that other requests are about to read, too."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from cacheblend_rag.kv.budget import Budget, Reservation
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.shared_chunk import SharedChunk

WANTED_BYTES = 1 << 30
"""Bytes of chunks that are kept for waiting requests, besides the tiers' memory."""


class WantedChunks:
    """Chunks that running or waiting requests have announced to read.

    A read is kept if another request wants the chunk as well, and as long as one does, whether or
    not a tier keeps the chunk: a full tier may turn it away. Beyond ``limit`` bytes none is kept.
    """

    def __init__(self, limit: int = WANTED_BYTES) -> None:
        self._room, self._lock = Budget(limit), threading.Lock()
        self._wanted = Counter[KVKey]()
        self._kept: dict[KVKey, dict[SharedChunk, Reservation]] = {}

    def add(self, keys: Iterable[KVKey]) -> None:
        """Announce that a request will read chunks, each named once."""
        with self._lock:
            self._wanted.update(keys)

    def remove(self, keys: Iterable[KVKey]) -> None:
        """End an announcement; what no other request wants is dropped."""
        with self._lock:
            for key in keys:
                self._wanted[key] -= 1
                if self._wanted[key] <= 0:  # below, if the announcement was interrupted
                    del self._wanted[key]
                    self._kept.pop(key, None)

    def keep(self, key: KVKey, chunk: SharedChunk) -> bool:
        """Keep what is read of a chunk, if several requests want it and there is room."""
        with self._lock:
            if self._wanted.get(key, 0) < 2 or (room := self._room.take(chunk.nbytes)) is None:
                return False
            self._kept.setdefault(key, {})[chunk] = room
        chunk.hold()
        return True

    def drop(self, key: KVKey) -> None:
        """Drop what was read of a chunk that was replaced or evicted."""
        with self._lock:
            self._kept.pop(key, None)
