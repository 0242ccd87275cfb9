"""What every tier does alike: counting, pins, turning failures into misses."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError, StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.tiers.admission import Admission, RefusedError, RejectedError, Resident
from cacheblend_rag.kv.tiers.policy import TierPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

COUNTED = (
    "hits", "misses", "admitted", "rejected", "refused", "evictions", "expired", "quarantined",
    "errors",
)  # fmt: skip


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


Read = StoredChunk | StoreError | None
"""What reading one of several chunks came to: there, unusable or out of reach, absent."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds now."""

    entries: int
    nbytes: int


class Tier(ABC):
    """One place where chunk KV is kept.

    A new tier implements the abstract methods: ``_entry``, ``_load``, ``_save`` and ``_drop`` may
    raise OSError, which the public methods turn into a miss or a failed put. All are called from
    several threads at once. Where one question about many chunks costs less than many questions,
    it overrides ``_entry_many`` and ``_load_many``, too.

    name: shown in reports and stats. policy: how it is used. durable: whether
    chunks outlive this process, so that ``check`` has bytes to check. entries_at_once,
    reads_at_once: threads that look up and read many chunks; 1 where a thread costs more than it
    saves. keeps_found: whether a chunk found in a slower tier is kept here, too. takes_puts:
    whether what is put into the store is stored here.
    """

    name: str
    durable: ClassVar[bool] = True
    entries_at_once: ClassVar[int] = 8
    reads_at_once: ClassVar[int] = 8
    keeps_found: bool = True
    takes_puts: bool = True

    def __init__(
        self, name: str, capacity_bytes: int | None = None, *, policy: TierPolicy | None = None
    ) -> None:
        self.name = name
        self.policy = TierPolicy.of(capacity_bytes, policy)
        self.capacity_bytes = self.policy.capacity_bytes
        self.keeps_found = type(self).keeps_found and self.policy.promote
        self.takes_puts = type(self).takes_puts and self.policy.write != "none"
        self._admission = Admission(self.policy)
        self._pinned: set[KVKey] = set()
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()

    @abstractmethod
    def _entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it; None when absent. Raises OSError."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Go through all stored chunks, in no given order; never on a request's way."""

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
        """Whether the same chunk is stored for another model or lead-in of the same namespace.

        Asked at each miss, so a tier that cannot tell without listing what it holds says no.
        """
        return False

    def contains(self, key: KVKey) -> bool:
        """Whether a chunk is stored here."""
        return self.entry(key) is not None

    def entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it or counting as its use.

        Returns None when it is absent or the tier cannot be read.
        """
        return self.entry_many([key])[0]

    def entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """As entry, for many chunks, in their order."""
        return self._entry_many(keys)

    def _entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """As ``_entry``, for many chunks, in their order. Raises OSError."""
        return _side_by_side(self._entry, keys, self.entries_at_once)

    def get(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk; None when absent.

        Raises DamagedChunkError or ForeignChunkError once it is quarantined, StoreError when the
        tier cannot be read.
        """
        (read,) = self.get_many([key])
        if isinstance(read, StoreError):
            raise read
        return read

    def get_many(self, keys: Sequence[KVKey]) -> list[Read]:
        """As get, for many chunks, in their order; an error stands in its chunk's place."""
        loaded = self._load_many(keys)
        return [self._settled(key, found) for key, found in zip(keys, loaded, strict=True)]

    def _load_many(self, keys: Sequence[KVKey]) -> list[Read | OSError]:
        """As ``_load``, for many chunks, in their order; an error stands in its chunk's place."""
        return _side_by_side(self._loaded, keys, self.reads_at_once)

    def _loaded(self, key: KVKey) -> Read | OSError:
        try:
            return self._load(key)
        except (StoreError, OSError) as error:
            return error

    def _settled(self, key: KVKey, found: Read | OSError) -> Read:
        """Count what reading a chunk came to, and take one that is unusable out of sight."""
        self._count("hits" if isinstance(found, StoredChunk) else "misses")
        if isinstance(found, DamagedChunkError | ForeignChunkError):
            self.quarantine(key, str(found))
        if not isinstance(found, OSError):
            return found
        self._count("errors")
        logger.warning("%s tier: could not read %s: %s", self.name, key, found)
        unread = StoreError(f"{self.name} tier: could not read {key}: {found}")
        unread.__cause__ = found
        return unread

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count chunks as asked for, wherever they are: what is seen often is kept."""
        self._admission.see(keys)

    def put(self, key: KVKey, chunk: StoredChunk) -> bool:
        """Store or replace a chunk; returns False, and logs why, when the tier did not take it."""
        try:
            self._save(key, chunk)
        except RejectedError as rejection:
            self._count("rejected")
            logger.debug("%s tier rejected %s: %s", self.name, key, rejection)
            return False
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
            self._admission.forget_rejections()
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

    def _let_go(
        self, key: KVKey, by_last_use: Iterable[Resident], *, excess: int, held: int, spare: int = 0
    ) -> list[KVKey]:
        """Return and count what a tier is to let go of so that a chunk fits.

        by_last_use: what is not pinned and not this chunk, least recently used first. excess: bytes
        too many. held: chunks in the tier. spare: bytes to let go of besides, at least.
        Raises RefusedError before anything is let go of in vain.
        """
        if excess <= 0:
            return []
        spare = max(spare, int((self.capacity_bytes or 0) * (1 - self.policy.watermark)))
        gone = self._admission.victims(key, by_last_use, excess=excess, spare=spare, held=held)
        self._count("admitted")
        self._count("evictions", len(gone))
        return [one.key for one in gone]

    def _count(self, name: str, times: int = 1) -> int:
        with self._counts_lock:
            self._counts[name] += times
            return self._counts[name]


def _side_by_side(do: Callable[[KVKey], T], keys: Sequence[KVKey], at_once: int) -> list[T]:
    """Return what ``do`` makes of each key, so many at once."""
    threads = min(at_once, len(keys))
    if threads <= 1:
        return [do(key) for key in keys]
    with ThreadPoolExecutor(threads, thread_name_prefix="kv-tier") as pool:
        return list(pool.map(do, keys))
