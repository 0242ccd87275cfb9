"""One lock per key, for the keys in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from cacheblend_rag.kv.chunk_kv import KVKey


@dataclass
class _Lock:
    """A key's lock, and the number of its holders and waiters."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class KeyLocks:
    """Admits one thread at a time per key; different keys never wait for each other."""

    def __init__(self) -> None:
        self._locks: dict[KVKey, _Lock] = {}
        self._changing = threading.Lock()

    def __len__(self) -> int:
        """Return how many keys' locks are held or waited for."""
        return len(self._locks)

    @contextmanager
    def held(self, *keys: KVKey) -> Iterator[None]:
        """Hold the keys' locks, always taken in one order, so that there is no deadlock."""
        with ExitStack() as stack:
            for key in sorted(set(keys), key=str):
                stack.enter_context(stack.enter_context(self._used(key)))
            yield

    @contextmanager
    def tried(self, key: KVKey) -> Iterator[bool]:
        """Hold a key's lock if it is free; yields whether it is, without waiting."""
        with self._used(key) as lock:
            is_held = lock.acquire(blocking=False)
            try:
                yield is_held
            finally:
                if is_held:
                    lock.release()

    @contextmanager
    def _used(self, key: KVKey) -> Iterator[threading.Lock]:
        """Yield a key's lock, which is kept as long as it has users."""
        with self._changing:
            own = self._locks.setdefault(key, _Lock())
            own.users += 1
        try:
            yield own.lock
        finally:
            with self._changing:
                own.users -= 1
                if not own.users:
                    del self._locks[key]
