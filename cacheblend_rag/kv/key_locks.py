"""One lock per key, for the keys in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakValueDictionary

from cacheblend_rag.kv.chunk_kv import KVKey


class KeyLocks:
    """Admits one thread at a time per key; different keys never wait for each other."""

    def __init__(self) -> None:
        self._locks = WeakValueDictionary[
            KVKey, Lock
        ]()  # each lives while it is held or waited for
        self._changing = Lock()

    def __len__(self) -> int:
        """Return how many keys' locks are held or waited for."""
        return len(self._locks)

    def held(self, key: KVKey) -> Lock:
        """Return a key's lock, which a ``with`` statement holds."""
        with self._changing:
            return self._locks.setdefault(key, Lock())

    @contextmanager
    def tried(self, key: KVKey) -> Iterator[bool]:
        """Hold a key's lock if it is free; yields whether it is, without waiting."""
        lock = self.held(key)
        is_held = lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()
