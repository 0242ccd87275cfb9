"""Finds and reads whole chunks, each in the fastest tier that has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.expiry import Expiry
from cacheblend_rag.kv.lookup import Lookup, miss_of
from cacheblend_rag.kv.packed_kv import unpacked
from cacheblend_rag.kv.reading import keep_in
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers import Tier


@dataclass(frozen=True, slots=True)
class Got:
    """The result of reading a chunk: the tier's chunk, or the reason of a miss."""

    chunk: StoredChunk | None
    told: Lookup

    @property
    def lookup(self) -> Lookup:
        """The same with the chunk unpacked."""
        return self.told if self.chunk is None else replace(self.told, kv=unpacked(self.chunk.kv))


class WholeChunks:
    """Asks each tier once for all chunks that the tiers before it lack."""

    def __init__(self, tiers: Sequence[Tier], expiry: Expiry) -> None:
        self._tiers, self._expiry = tiers, expiry

    def held(self, keys: Iterable[KVKey]) -> dict[KVKey, Entry]:
        """Return the entries of those chunks that are stored."""
        missing, held = list(dict.fromkeys(keys)), dict[KVKey, Entry]()
        for tier in self._tiers:
            for key, entry in zip(missing, tier.entry_many(missing), strict=True):
                if entry is not None and not self._expiry.is_past(tier, key, entry.written_at):
                    held[key] = entry
            missing = [key for key in missing if key not in held]
        return held

    def get_many(self, keys: Iterable[KVKey], *, promote: bool) -> dict[KVKey, Got]:
        """Read chunks, under their locks.

        promote: whether found chunks are kept in faster tiers.
        """
        found = dict.fromkeys(keys, Got(None, Lookup.missed("not stored")))
        for depth, tier in enumerate(self._tiers):
            missing = [key for key, got in found.items() if got.chunk is None]
            for key, read in zip(missing, self._read(tier, missing), strict=True):
                if isinstance(read, StoreError):
                    reason = miss_of(read)
                    failed = tier.name if reason == "store error" else None
                    found[key] = Got(None, Lookup.missed(reason, failed))
                elif read is not None:
                    found[key] = Got(read, Lookup(None, tier.name, None))
                    if promote:
                        keep_in(self._tiers[:depth], key, read)
        return found

    def _read(self, tier: Tier, keys: Sequence[KVKey]) -> list[Read]:
        """Read chunks of one tier that are not expired."""
        gone = self._expiry.remove_from(tier, keys)
        read = iter(tier.get_many([key for key in keys if key not in gone]))
        return [
            None if key in gone else self._expiry.in_time(tier, key, next(read)) for key in keys
        ]
