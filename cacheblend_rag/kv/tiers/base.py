"""The base class of tiers: the methods that the store calls, built on what a tier implements."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Set

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.mac import CHECKSUM, Mac
from cacheblend_rag.kv.packed_kv import LayerKV
from cacheblend_rag.kv.put_result import PutResult, told
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.admission import Capacity
from cacheblend_rag.kv.tiers.breaker import OutError
from cacheblend_rag.kv.tiers.contract import TierContract, TierPolicy, Usage
from cacheblend_rag.kv.tiers.counters import Counters
from cacheblend_rag.kv.tiers.reads import Lookups, Quarantine, Reads
from cacheblend_rag.kv.tiers.writes import Writes

logger = logging.getLogger(__name__)


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
        writable = not self.policy.read_only
        self.keeps_found = type(self).keeps_found and self.policy.promote and writable
        self.takes_puts = type(self).takes_puts and self.policy.write != "none" and writable
        self.mac, self.ttl_seconds = CHECKSUM, self.policy.ttl_seconds
        self._pinned: set[KVKey] = set()
        counts = self._counts = Counters()
        access = self.access = Access(self, counts)
        self._capacity = Capacity(self.policy, counts)
        self._lookups, self._quarantine = Lookups(self, access), Quarantine(self, access, counts)
        self._reads = Reads(self, access, counts, self._quarantine)
        self._writes = Writes(self, access, counts, self._capacity)

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
        return self._lookups.entry_many(keys)

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
        return self._reads.get(key)

    def get_many(self, keys: Sequence[KVKey]) -> list[Read]:
        """As get, for many chunks, in their order; an error stands in its chunk's place."""
        return self._reads.get_many(keys)

    def open(self, key: KVKey) -> ChunkReader | StoreError | None:
        """As get, but for the chunk's layers, which ``read_layers`` reads; an error is returned."""
        return self._reads.open(key)

    def read_layers(
        self, key: KVKey, reader: ChunkReader, first: int, last: int
    ) -> Sequence[LayerKV]:
        """Read layers ``first`` to ``last - 1`` of a chunk that was opened here; raises as get."""
        return self._reads.layers(key, reader, first, last)

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count accesses of chunks in any tier: often accessed chunks are kept."""
        self._capacity.see(keys)

    def put(self, key: KVKey, chunk: StoredChunk) -> PutResult:
        """Store or replace a chunk; if the tier did not take it, returns and logs the reason.

        Raises NotFiniteError if the tier checked the chunk's numbers.
        """
        return self._writes.put(key, chunk)

    def evict(self, key: KVKey) -> bool | None:
        """Remove a chunk, pinned or not; returns whether it was there, None if that failed."""
        return self._writes.evict(key)

    def expire(self, key: KVKey) -> bool:
        """As evict, counted as the end of the chunk's time to live."""
        return self._writes.expire(key)

    def quarantine(self, key: KVKey, reason: str) -> None:
        """Move an unusable chunk out of use and count it; a read-only tier leaves it in place."""
        self._quarantine.add(key, reason)

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
        usage = self._usage()
        return {
            "entries": None if usage is None else usage.entries,
            "bytes": None if usage is None else usage.nbytes,
            "capacity_bytes": self.capacity_bytes,
            **self._counts.all(),
        }

    def _usage(self) -> Usage | None:
        try:
            with self.access.to_write():  # which may take a lock, as this does
                return self.usage()
        except OSError as error:
            level = logging.DEBUG if isinstance(error, OutError) else logging.WARNING
            logger.log(level, "%s tier: could not count what is stored: %s", self.name, error)
            return None
