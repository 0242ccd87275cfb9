"""What every tier does alike: counting, pins, turning failures into misses."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError, StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey

logger = logging.getLogger(__name__)

COUNTED = ("hits", "misses", "evictions", "expired", "quarantined", "refused", "errors")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tier knows of a stored chunk without reading it; times are Unix seconds."""

    nbytes: int
    written_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk KV and when it was first written, which moving it between tiers does not change."""

    kv: ChunkKV
    written_at: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds now."""

    entries: int
    nbytes: int


class RefusedError(Exception):
    """A tier's ``_save`` will not take a chunk; the message says why. Never leaves ``put``."""


class Tier(ABC):
    """One place where chunk KV is kept.

    A new tier implements the abstract methods: ``_load``, ``_save`` and ``_drop`` may raise
    OSError, which the public methods turn into a miss or a failed put. All are called from
    several threads at once.

    name: shown in reports and stats. capacity_bytes: None is without limit. durable: whether
    chunks outlive this process, so that ``check`` has bytes to check.
    """

    name: str
    durable: ClassVar[bool] = True

    def __init__(self, name: str, capacity_bytes: int | None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise StoreError(f"capacity_bytes={capacity_bytes} must be at least 0")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._pinned: set[KVKey] = set()
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()

    @abstractmethod
    def entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it or counting as its use; None when absent."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Go through all stored chunks, in no given order."""

    @abstractmethod
    def usage(self) -> Usage:
        """Count what is stored."""

    @abstractmethod
    def _load(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk and mark it used; raises DamagedChunkError, ForeignChunkError, OSError."""

    @abstractmethod
    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        """Store or replace a chunk, evicting others; raises RefusedError, OSError."""

    @abstractmethod
    def _drop(self, key: KVKey) -> bool:
        """Remove a chunk; returns whether it was there. Raises OSError."""

    def quarantine(self, key: KVKey, reason: str) -> None:
        """Take an unusable chunk out of sight, and count it."""
        logger.warning("%s tier: %s set aside: %s", self.name, key, reason)
        self._count("quarantined")
        try:
            self._set_aside(key, reason)
        except OSError as error:
            self._count("errors")
            logger.warning("%s tier: could not set %s aside: %s", self.name, key, error)

    def _set_aside(self, key: KVKey, reason: str) -> None:
        """Keep the bytes for inspection where that is possible; here they are dropped."""
        self._drop(key)

    def check(self, key: KVKey) -> str | None:
        """Read a stored chunk through; returns what is wrong with it, None when sound or gone."""
        return None

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace."""
        return any(key.is_relative(other) for other, _ in self.entries())

    def contains(self, key: KVKey) -> bool:
        """Whether a chunk is stored here."""
        return self.entry(key) is not None

    def get(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk; None when absent.

        Raises DamagedChunkError or ForeignChunkError once it is quarantined, StoreError when the
        tier cannot be read.
        """
        try:
            found = self._load(key)
        except (DamagedChunkError, ForeignChunkError) as error:
            self.quarantine(key, str(error))
            self._count("misses")
            raise
        except OSError as error:
            self._count("errors")
            self._count("misses")
            logger.warning("%s tier: could not read %s: %s", self.name, key, error)
            raise StoreError(f"{self.name} tier: could not read {key}: {error}") from error
        self._count("misses" if found is None else "hits")
        return found

    def put(self, key: KVKey, chunk: StoredChunk) -> bool:
        """Store or replace a chunk; returns False, and logs why, when the tier did not take it."""
        try:
            self._save(key, chunk)
        except RefusedError as refusal:
            # One warning a tier: a capacity below one chunk would otherwise fill the log.
            first = self._count("refused") == 1
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "%s tier refused %s: %s", self.name, key, refusal)
            return False
        except OSError as error:
            self._count("errors")
            logger.warning("%s tier: could not store %s: %s", self.name, key, error)
            return False
        return True

    def evict(self, key: KVKey) -> bool:
        """Remove a chunk, pinned or not; returns whether it was there."""
        return self._remove(key, "evictions")

    def expire(self, key: KVKey) -> bool:
        """As evict, counted as the end of the chunk's time to live."""
        return self._remove(key, "expired")

    def _remove(self, key: KVKey, counter: str) -> bool:
        try:
            removed = self._drop(key)
        except OSError as error:
            self._count("errors")
            logger.warning("%s tier: could not remove %s: %s", self.name, key, error)
            return False
        if removed:
            self._count(counter)
        return removed

    def pin(self, key: KVKey) -> None:
        """Exempt a chunk from eviction by capacity, in this process, stored yet or not."""
        self._pinned.add(key)

    def unpin(self, key: KVKey) -> None:
        """Undo pin."""
        self._pinned.discard(key)

    def stats(self) -> dict[str, int | None]:
        """Return entries, bytes, capacity_bytes, and this process's counts of what happened."""
        usage = self.usage()
        with self._counts_lock:
            counts = {name: self._counts[name] for name in COUNTED}
        held = {"entries": usage.entries, "bytes": usage.nbytes}
        return {**held, "capacity_bytes": self.capacity_bytes, **counts}

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to let go of
        """Let go of memory, files and connections."""

    def _count(self, name: str, times: int = 1) -> int:
        with self._counts_lock:
            self._counts[name] += times
            return self._counts[name]
