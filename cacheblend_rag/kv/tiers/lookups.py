"""Looks up which chunks a tier has, without reading them; a failure is a miss."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.contract import TierContract
from cacheblend_rag.kv.tiers.parallel import in_parallel


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
