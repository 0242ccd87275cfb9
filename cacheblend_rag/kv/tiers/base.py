"""The base class of tiers: the methods that the store calls, built on what a tier implements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.mac import CHECKSUM, Mac
from cacheblend_rag.kv.packed_kv import LayerKV
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.stored_chunk import Entry, PutResult, Read, StoredChunk, told
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.admission import Capacity, RefusedError, RejectedError
from cacheblend_rag.kv.tiers.breaker import OutError
from cacheblend_rag.kv.tiers.contract import Counters, TierContract, TierPolicy, Usage
from cacheblend_rag.openmp import use_one_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tier(TierContract):
    """One place where chunk KV is kept; counts, pins, admission and failures are the same for all.

    Unless its docstring says so, no method raises because the storage fails: that is a miss or a
    failed put.

    access: wraps each use of the storage, and skips it while it fails.
    """

    def __init__(
        self, name: str, capacity_bytes: int | None = None, *, policy: TierPolicy | None = None
    ) -> None:
        self.name = name
        self.policy = TierPolicy.of(capacity_bytes, policy)
        self.capacity_bytes = self.policy.capacity_bytes
        if self.fails_whole and self.capacity_bytes is not None:
            raise StoreError(f"the {name} tier takes no capacity: its server has limits of its own")
        writable = not self.policy.read_only
        self.keeps_found = type(self).keeps_found and self.policy.promote and writable
        self.takes_puts = type(self).takes_puts and self.policy.write != "none" and writable
        self.mac, self.ttl_seconds = CHECKSUM, self.policy.ttl_seconds
        self._pinned: set[KVKey] = set()
        self._counts = Counters()
        self.access = Access(self, self._counts)
        self._capacity = Capacity(self.policy, self._counts)

    def join(self, mac: Mac, ttl_seconds: float | None) -> None:
        """Join a store with this MAC and time to live, unless the policy's is lower."""
        self.mac = mac
        given = [s for s in (self.policy.ttl_seconds, ttl_seconds) if s is not None]
        self.ttl_seconds = min(given, default=None)

    @property
    def is_failing(self) -> bool:
        """Whether the last read failed."""
        return self.access.reading.is_failing

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
        if not keys:
            return []
        try:
            with self.access.to_read(keys[0], timed=False):
                together = self._entry_many(keys)
                if together is not None:
                    return together
                return _in_parallel(self._looked_up, keys, self.entries_at_once)
        except OSError as error:
            self.access.could_not("look up %s", keys[0], error, reading=True)
            return [None] * len(keys)

    def _looked_up(self, key: KVKey) -> Entry | None:
        try:
            with self.access.to_read(key):
                return self._entry(key)
        except OSError as error:
            self.access.could_not("look up %s", key, error, reading=True)
            return None

    def all_entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all chunks; raises StoreError when the tier cannot be listed."""
        try:
            yield from self.entries()
        except OSError as error:
            raise StoreError(f"the {self.name} tier cannot be listed: {told(error)}") from error

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
        if not keys:
            return []
        loaded: list[Read | OSError]
        try:
            with self.access.to_read(keys[0], timed=False) as permit:
                together = self._load_many(keys)
                loaded = (
                    _in_parallel(self._loaded, keys, self.reads_at_once)
                    if together is None
                    else together
                )
                if self.fails_whole and any(isinstance(one, OSError) for one in loaded):
                    self.access.reading.failed(permit)
        except OSError as error:
            loaded = [error] * len(keys)
        return [self._settled(key, found) for key, found in zip(keys, loaded, strict=True)]

    def _loaded(self, key: KVKey) -> Read | OSError:
        try:
            with self.access.to_read(key):
                return self._load(key)
        except (StoreError, OSError) as error:
            return error

    def _settled(self, key: KVKey, found: Read | OSError) -> Read:
        """Count the result of a read, and quarantine an unusable chunk."""
        self._counts.add("hits" if isinstance(found, StoredChunk) else "misses")
        return found if isinstance(found, StoredChunk) else self._failed(key, found)

    def _failed(self, key: KVKey, found: StoreError | OSError | None) -> StoreError | None:
        """Quarantine an unusable chunk; returns the error to report, if any."""
        if isinstance(found, OSError):
            self.access.could_not("read %s", key, found, reading=True)
            unread = StoreError(f"{self.name} tier: could not read {key}: {found}")
            unread.__cause__ = found
            return unread
        if isinstance(found, BadSignatureError) and not self.mac.by_key:
            # It is valid for holders of the key, who may remove it.
            logger.warning("%s tier: %s is not read: %s", self.name, key, found)
        elif isinstance(found, DamagedChunkError | ForeignChunkError):
            self.quarantine(key, str(found))
        return found

    def open(self, key: KVKey) -> ChunkReader | StoreError | None:
        """As get, but for the chunk's layers, which ``read_layers`` reads; an error is returned."""
        opened: ChunkReader | StoreError | OSError | None
        try:
            with self.access.to_read(key):
                opened = self._open(key)
        except (StoreError, OSError) as error:
            opened = error
        self._counts.add("hits" if isinstance(opened, ChunkReader) else "misses")
        return opened if isinstance(opened, ChunkReader) else self._failed(key, opened)

    def read_layers(
        self, key: KVKey, reader: ChunkReader, first: int, last: int
    ) -> Sequence[LayerKV]:
        """Read layers ``first`` to ``last - 1`` of a chunk that was opened here; raises as get."""
        try:
            with self.access.to_read(key):
                return reader.read(first, last)
        except (StoreError, OSError) as error:
            failed = self._failed(key, error)
            raise failed or error from error

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count accesses of chunks in any tier: often accessed chunks are kept."""
        self._capacity.see(keys)

    def put(self, key: KVKey, chunk: StoredChunk) -> PutResult:
        """Store or replace a chunk; if the tier did not take it, returns and logs the reason.

        Raises NotFiniteError if the tier checked the chunk's numbers.
        """
        if self.policy.read_only:
            return PutResult(False)
        try:
            with self.access.to_write(key):
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
            self.access.could_not("store %s", key, error, reading=False)
            cause = self.access.last_failure if isinstance(error, OutError) else told(error)
            return PutResult(False, f"{self.name} tier: {cause}")
        return PutResult(True)

    def evict(self, key: KVKey) -> bool | None:
        """Remove a chunk, pinned or not; returns whether it was there, None if that failed."""
        return self._remove(key, "evictions")

    def expire(self, key: KVKey) -> bool:
        """As evict, counted as the end of the chunk's time to live."""
        return bool(self._remove(key, "expired"))

    def _remove(self, key: KVKey, counter: str) -> bool | None:
        if self.policy.read_only:
            return False
        try:
            with self.access.to_write(key):
                removed = self._drop(key)
        except OSError as error:
            self.access.could_not("remove %s", key, error, reading=False)
            return None
        if removed:
            self._capacity.freed(counter, 1)
        return removed

    def quarantine(self, key: KVKey, reason: str) -> None:
        """Move an unusable chunk out of use and count it; a read-only tier leaves it in place."""
        if self.policy.read_only:
            logger.warning("%s tier: %s cannot be used: %s", self.name, key, reason)
            return
        logger.warning("%s tier: %s quarantined: %s", self.name, key, reason)
        self._counts.add("quarantined")
        try:
            with self.access.to_write(key):
                self._set_aside(key, reason)
        except OSError as error:
            self.access.could_not("set %s aside", key, error, reading=False)

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
            with self.access.to_write(timed=not self.fails_whole):
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
