"""Reads the chunks of one tier, whole or by layers; counts them, and quarantines unusable ones."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.packed_kv import LayerKV
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.stored_chunk import Read, StoredChunk
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.contract import TierContract
from cacheblend_rag.kv.tiers.counters import Counters
from cacheblend_rag.kv.tiers.parallel import in_parallel
from cacheblend_rag.kv.tiers.quarantine import Quarantine


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
