"""The base class of tiers: what a tier implements, and what the store calls."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar, TypeVar

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.mac import CHECKSUM, Mac
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.shared_chunk import PARTS_AT_ONCE
from cacheblend_rag.kv.stored_chunk import Entry, PutResult, Read, StoredChunk, told
from cacheblend_rag.kv.tiers.admission import Capacity, RefusedError, RejectedError
from cacheblend_rag.kv.tiers.breaker import OutError
from cacheblend_rag.kv.tiers.guard import Guard
from cacheblend_rag.kv.tiers.policy import Counters, TierPolicy, Usage
from cacheblend_rag.openmp import use_one_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tier(ABC):
    """One place where chunk KV is kept.

    A new tier implements the abstract methods, and overrides others if it can do better. Those with
    an underscore may raise OSError: its guard makes that a miss or a failed put. All are called
    from several threads at once. Unless its docstring says so, no method without an underscore
    raises because the storage fails.

    name: shown in reports and stats. policy: how it is used. mac: the MAC of stored bytes.
    ttl_seconds: time after which copies expire, the lower one of the policy's and the store's.
    guard: wraps each use of the storage, and skips it while it fails.
    durable: whether chunks outlive this process, so that ``check`` has bytes to check.
    entries_at_once, reads_at_once: threads that look up and read many chunks; 1 if a thread costs
    more than it saves. parts_at_once: see SharedChunk's at_once. fails_whole: whether any failure
    affects the whole tier (a network's), not one chunk or only writing (a disk's). keeps_found:
    whether a chunk found in a slower tier is kept here, too. takes_puts: whether chunks put into
    the store are stored here. keeps_pins: whether pins outlive this process and hold for all
    processes that share the tier.
    """

    durable: ClassVar[bool] = True
    entries_at_once: ClassVar[int] = 8
    reads_at_once: ClassVar[int] = 8
    parts_at_once: ClassVar[int] = PARTS_AT_ONCE
    fails_whole: ClassVar[bool] = False
    keeps_pins: ClassVar[bool] = False

    def __init__(
        self, name: str, capacity_bytes: int | None = None, *, policy: TierPolicy | None = None
    ) -> None:
        self.name = name
        self.policy = TierPolicy.of(capacity_bytes, policy)
        self.capacity_bytes = self.policy.capacity_bytes
        if self.fails_whole and self.capacity_bytes is not None:
            raise StoreError(f"the {name} tier takes no capacity: its server has limits of its own")
        self.keeps_found = self.policy.promote and not self.policy.read_only
        self.takes_puts = not self.policy.read_only
        self.mac: Mac = CHECKSUM
        self.ttl_seconds = self.policy.ttl_seconds
        self._pinned: set[KVKey] = set()
        self._counts = Counters()
        self._capacity = Capacity(self.policy, self._counts)
        self.guard = Guard(
            name,
            self._counts,
            self._entry,
            fails_whole=self.fails_whole,
            timeout_seconds=self.policy.timeout_seconds,
        )

    # What a tier implements

    @abstractmethod
    def _entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it; None when absent."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all stored chunks in any order; never called during a request."""

    @abstractmethod
    def _open(self, key: KVKey) -> ChunkReader | None:
        """Read a chunk's head, and return a reader of its layers; None when absent.

        Whether to blend a prompt is decided from heads. Raises DamagedChunkError and
        ForeignChunkError, as the reader does.
        """

    @abstractmethod
    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        """Store or replace a chunk, evicting those that the tier's ``_capacity`` names.

        Raises RefusedError.
        """

    @abstractmethod
    def _drop(self, key: KVKey) -> bool:
        """Remove a chunk; returns whether it was there."""

    def usage(self) -> Usage:
        """Count the stored chunks and bytes, by default by listing them; may raise OSError."""
        sizes = {key: entry.nbytes for key, entry in self.entries()}
        return Usage(len(sizes), sum(sizes.values()))

    # What a tier may do better

    def _mark_used(self, key: KVKey) -> None:  # noqa: B027 - servers know themselves
        """Note that a chunk is used now."""

    def _set_aside(self, key: KVKey) -> None:
        """Keep the bytes for inspection if possible; by default they are dropped."""
        self._drop(key)

    def some_entries(self) -> Iterable[tuple[KVKey, Entry]]:
        """Return some of the stored chunks, to check whether they are expired.

        Empty by default, and for network tiers: their servers expire chunks, or expired chunks are
        removed when they are found.
        """
        return ()

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace.

        Called at each miss, so a tier that would have to list its chunks returns False.
        """
        return False

    def would_take(self, key: KVKey, nbytes: int) -> bool:
        """Whether a chunk of so many bytes would probably be stored."""
        return True

    def release(self) -> int:
        """Free the memory of chunks here, if any; returns its bytes. Pinned chunks stay."""
        return 0

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to free
        """Free memory, files and connections."""

    # What the store calls

    def join(self, mac: Mac, ttl_seconds: float | None) -> None:
        """Join a store with this MAC and time to live, unless the policy's is lower."""
        self.mac = mac
        given = [s for s in (self.policy.ttl_seconds, ttl_seconds) if s is not None]
        self.ttl_seconds = min(given, default=None)

    @property
    def is_failing(self) -> bool:
        """Whether the last read failed."""
        return self.guard.reading.is_failing

    def contains(self, key: KVKey) -> bool:
        """Whether a chunk is stored here."""
        return self.entry(key) is not None

    def entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it or counting as its use.

        Returns None when it is absent or the tier cannot be read.
        """
        with suppress(OSError), self.guard.reads("look up %s", key):
            return self._entry(key)
        return None

    def entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """As entry, for many chunks, in their order."""
        return _in_parallel(self.entry, keys, self.entries_at_once)

    def all_entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all chunks; raises StoreError when the tier cannot be listed."""
        try:
            yield from self.entries()
        except OSError as error:
            raise StoreError(f"the {self.name} tier cannot be listed: {told(error)}") from error

    def get(self, key: KVKey) -> Read:
        """Read a chunk; None when absent.

        An error is returned: DamagedChunkError or ForeignChunkError once the chunk is quarantined,
        StoreError when the tier cannot be read.
        """

        def load() -> StoredChunk | None:
            reader = self._opened(key)
            return None if reader is None else StoredChunk(reader.whole(), reader.written_at)

        return self._counted(key, load)

    def get_many(self, keys: Sequence[KVKey]) -> list[Read]:
        """As get, for many chunks, in their order."""
        return _in_parallel(self.get, keys, self.reads_at_once)

    def open(self, key: KVKey) -> ChunkReader | StoreError | None:
        """As get, but for the chunk's layers, which ``read_layers`` reads."""
        return self._counted(key, lambda: self._opened(key))

    def _opened(self, key: KVKey) -> ChunkReader | None:
        reader = self._open(key)
        if reader is not None and not self.policy.read_only:
            self._mark_used(key)
        return reader

    def _counted(self, key: KVKey, read: Callable[[], T | None]) -> T | StoreError | None:
        """Call ``read``, and count a hit or a miss; a StoreError is returned, not raised."""
        found: T | StoreError | None
        try:
            with self.guard.reads("read %s", key):
                found = read()
        except (StoreError, OSError) as error:
            self._counts.add("misses")
            return self._unusable(key, error)
        self._counts.add("misses" if found is None else "hits")
        return found

    def read_layers(self, key: KVKey, reader: ChunkReader, first: int, last: int) -> ChunkKV:
        """Read layers ``first`` to ``last - 1`` of a chunk that was opened here.

        Raises the errors that ``get`` returns.
        """
        try:
            with self.guard.reads("read %s", key):
                return reader.read(first, last)
        except (StoreError, OSError) as error:
            raise self._unusable(key, error) from error

    def _unusable(self, key: KVKey, error: StoreError | OSError) -> StoreError:
        """Return the error to report of a chunk that cannot be read; quarantine it if it is bad."""
        if isinstance(error, OSError):
            unread = StoreError(f"{self.name} tier: could not read {key}: {error}")
            unread.__cause__ = error
            return unread
        if isinstance(error, BadSignatureError) and not self.mac.by_key:
            # It is valid for holders of the key, who may remove it.
            logger.warning("%s tier: %s is not read: %s", self.name, key, error)
        elif isinstance(error, DamagedChunkError | ForeignChunkError):
            self.quarantine(key, str(error))
        return error

    def check(self, key: KVKey) -> str | None:
        """Read a whole chunk; returns what is wrong with it, None if it is sound or gone.

        This is not counted as its use.
        """
        try:
            reader = self._open(key)
            if reader is not None:
                reader.whole()
        except (DamagedChunkError, ForeignChunkError, OSError) as error:
            return str(error)
        return None

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count accesses of chunks in any tier: often accessed chunks are kept."""
        self._capacity.see(keys)

    def put(self, key: KVKey, chunk: StoredChunk) -> PutResult:
        """Store or replace a chunk; if the tier did not take it, returns and logs the reason."""
        if self.policy.read_only:
            return PutResult(False)
        try:
            with self.guard.writes("store %s", key):
                self._save(key, chunk)
        except RejectedError as rejection:
            self._counts.add("rejected")
            logger.debug("%s tier rejected %s: %s", self.name, key, rejection)
            return PutResult(False)
        except RefusedError as refusal:
            # One warning per tier: a capacity below one chunk would otherwise fill the log.
            first = self._counts.add("refused") == 1
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "%s tier refused %s: %s", self.name, key, refusal)
            return PutResult(False)
        except OSError as error:
            return PutResult(False, f"{self.name} tier: {told(error)}")
        return PutResult(True)

    def evict(self, key: KVKey, counts: str = "evictions") -> bool | None:
        """Remove a chunk, pinned or not; returns whether it was there, None if that failed.

        counts: ``expired`` at the end of its time to live.
        """
        if self.policy.read_only:
            return False
        try:
            with self.guard.writes("remove %s", key):
                removed = self._drop(key)
        except OSError:
            return None
        if removed:
            self._counts.add(counts)
        return removed

    def quarantine(self, key: KVKey, reason: str) -> None:
        """Move an unusable chunk out of use and count it; a read-only tier leaves it in place."""
        if self.policy.read_only:
            logger.warning("%s tier: %s cannot be used: %s", self.name, key, reason)
            return
        logger.warning("%s tier: %s quarantined: %s", self.name, key, reason)
        self._counts.add("quarantined")
        with suppress(OSError), self.guard.writes("set %s aside", key):
            self._set_aside(key)

    def pin(self, *keys: KVKey) -> None:
        """Exempt chunks from eviction by capacity and age, stored yet or not.

        Only in this process, unless the tier keeps pins.
        """
        self._pinned.update(keys)

    def unpin(self, *keys: KVKey) -> None:
        """Undo pin."""
        self._pinned.difference_update(keys)

    def pinned(self) -> Set[KVKey]:
        """Return the keys that are pinned here, of chunks stored or not."""
        return self._pinned

    def is_pinned(self, key: KVKey) -> bool:
        """Whether a chunk is exempt from eviction by capacity and by age."""
        return key in self.pinned()

    def stats(self) -> dict[str, int | None]:
        """Return entries, bytes, capacity_bytes, and this process's counters.

        Entries and bytes are None if the tier cannot be asked.
        """
        usage: Usage | None = None
        try:
            # A disk takes its lock, as writing does. A network tier lists what it holds, which may
            # take longer than an answer.
            with self.guard.uses(timed=not self.fails_whole):
                usage = self.usage()
        except OSError as error:
            level = logging.DEBUG if isinstance(error, OutError) else logging.WARNING
            logger.log(level, "%s tier: could not count what is stored: %s", self.name, error)
        return {
            "entries": None if usage is None else usage.entries,
            "bytes": None if usage is None else usage.nbytes,
            "capacity_bytes": self.capacity_bytes,
            **self._counts.all(),
        }


def _in_parallel(do: Callable[[KVKey], T], keys: Sequence[KVKey], threads: int) -> list[T]:
    """Return the results of ``do`` for all keys, in their order, computed on so many threads."""
    threads = min(threads, len(keys))
    if threads <= 1:
        return [do(key) for key in keys]
    with ThreadPoolExecutor(threads, "kv-tier", initializer=use_one_thread) as pool:
        return list(pool.map(do, keys))
