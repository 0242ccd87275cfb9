"""Looks up and reads the chunks of one tier, whole or by layers, and quarantines unusable ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.packed_kv import LayerKV
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.contract import TierContract
from cacheblend_rag.kv.tiers.counters import Counters
from cacheblend_rag.openmp import use_one_thread

logger = logging.getLogger(__name__)


T = TypeVar("T")


class Quarantine:
    """The quarantine of one tier; what is kept of a chunk is up to the tier's ``_set_aside``."""

    def __init__(self, tier: TierContract, access: Access, counts: Counters) -> None:
        self._tier, self._access, self._counts = tier, access, counts

    def add(self, key: KVKey, reason: str) -> None:
        """See ``Tier.quarantine``."""
        name = self._tier.name
        if self._tier.policy.read_only:
            logger.warning("%s tier: %s cannot be used: %s", name, key, reason)
            return
        logger.warning("%s tier: %s quarantined: %s", name, key, reason)
        self._counts.add("quarantined")
        try:
            with self._access.to_write(key):
                self._tier._set_aside(key, reason)
        except OSError as error:
            self._access.could_not_write("set %s aside", key, error)

    def add_unusable(self, key: KVKey, error: StoreError | None) -> None:
        """Add a chunk if the error of reading it says that it cannot be used by anybody."""
        if isinstance(error, BadSignatureError) and not self._tier.mac.by_key:
            # It is valid for holders of the key, who may remove it.
            logger.warning("%s tier: %s is not read: %s", self._tier.name, key, error)
        elif isinstance(error, DamagedChunkError | ForeignChunkError):
            self.add(key, str(error))


class Reads:
    """Reads from one tier."""

    def __init__(
        self, tier: TierContract, access: Access, counts: Counters, quarantine: Quarantine
    ) -> None:
        self._tier, self._access, self._counts = tier, access, counts
        self._quarantine = quarantine

    def get(self, key: KVKey) -> StoredChunk | None:
        """See ``Tier.get``."""
        (read,) = self.get_many([key])
        if isinstance(read, StoreError):
            raise read
        return read

    def get_many(self, keys: Sequence[KVKey]) -> list[Read]:
        """See ``Tier.get_many``."""
        if not keys:
            return []
        loaded: list[Read | OSError]
        try:
            with self._access.to_read(keys[0], timed=False) as permit:
                loaded = self._loaded_all(keys)
                if self._tier.fails_whole and any(isinstance(one, OSError) for one in loaded):
                    self._access.reading.failed(permit)
        except OSError as error:
            loaded = [error] * len(keys)
        return [self._settled(key, found) for key, found in zip(keys, loaded, strict=True)]

    def open(self, key: KVKey) -> ChunkReader | StoreError | None:
        """See ``Tier.open``."""
        opened: ChunkReader | StoreError | OSError | None
        try:
            with self._access.to_read(key):
                opened = self._tier._open(key)
        except (StoreError, OSError) as error:
            opened = error
        self._counts.add("hits" if isinstance(opened, ChunkReader) else "misses")
        return opened if isinstance(opened, ChunkReader) else self._failed(key, opened)

    def layers(self, key: KVKey, reader: ChunkReader, first: int, last: int) -> Sequence[LayerKV]:
        """See ``Tier.read_layers``."""
        try:
            with self._access.to_read(key):
                return reader.read(first, last)
        except (StoreError, OSError) as error:
            failed = self._failed(key, error)
            raise failed or error from error

    def _loaded_all(self, keys: Sequence[KVKey]) -> list[Read | OSError]:
        together = self._tier._load_many(keys)
        if together is not None:
            return together
        return in_parallel(self._loaded, keys, self._tier.reads_at_once)

    def _loaded(self, key: KVKey) -> Read | OSError:
        try:
            with self._access.to_read(key):
                return self._tier._load(key)
        except (StoreError, OSError) as error:
            return error

    def _settled(self, key: KVKey, found: Read | OSError) -> Read:
        """Count the result of a read, and quarantine an unusable chunk."""
        self._counts.add("hits" if isinstance(found, StoredChunk) else "misses")
        return found if isinstance(found, StoredChunk) else self._failed(key, found)

    def _failed(self, key: KVKey, found: StoreError | OSError | None) -> StoreError | None:
        """Quarantine an unusable chunk; returns the error to report, if any."""
        if not isinstance(found, OSError):
            self._quarantine.add_unusable(key, found)
            return found
        self._access.could_not_read("read %s", key, found)
        unread = StoreError(f"{self._tier.name} tier: could not read {key}: {found}")
        unread.__cause__ = found
        return unread


def in_parallel(do: Callable[[KVKey], T], keys: Sequence[KVKey], threads: int) -> list[T]:
    """Return the results of ``do`` for all keys, in their order, computed on so many threads."""
    threads = min(threads, len(keys))
    if threads <= 1:
        return [do(key) for key in keys]
    with ThreadPoolExecutor(threads, "kv-tier", initializer=use_one_thread) as pool:
        return list(pool.map(do, keys))


class Lookups:
    """Looks up the chunks of one tier."""

    def __init__(self, tier: TierContract, access: Access) -> None:
        self._tier, self._access = tier, access

    def entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """See ``Tier.entry_many``."""
        if not keys:
            return []
        try:
            with self._access.to_read(keys[0], timed=False):
                together = self._tier._entry_many(keys)
                if together is not None:
                    return together
                return in_parallel(self._one, keys, self._tier.entries_at_once)
        except OSError as error:
            self._access.could_not_read("look up %s", keys[0], error)
            return [None] * len(keys)

    def _one(self, key: KVKey) -> Entry | None:
        try:
            with self._access.to_read(key):
                return self._tier._entry(key)
        except OSError as error:
            self._access.could_not_read("look up %s", key, error)
            return None
