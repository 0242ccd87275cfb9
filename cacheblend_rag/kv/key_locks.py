"""One lock per key, for the keys in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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

    @contextmanager
    def held(self, *keys: KVKey) -> Iterator[None]:
        """Hold the keys' locks, always taken in one order, so that there is no deadlock."""
        with ExitStack() as stack:
            for key in sorted(set(keys), key=str):
                stack.enter_context(self._lock(key))
            yield

    @contextmanager
    def tried(self, key: KVKey) -> Iterator[bool]:
        """Hold a key's lock if it is free; yields whether it is, without waiting."""
        lock = self._lock(key)
        is_held = lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()

    def _lock(self, key: KVKey) -> Lock:
        with self._changing:
            return self._locks.setdefault(key, Lock())
