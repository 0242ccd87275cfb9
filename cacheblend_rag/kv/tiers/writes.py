"""Stores chunks in one tier and removes them; counts and logs both."""

from __future__ import annotations

import logging

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.put_result import PutResult, told
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.admission import Capacity, RefusedError, RejectedError
from cacheblend_rag.kv.tiers.breaker import OutError
from cacheblend_rag.kv.tiers.contract import TierContract
from cacheblend_rag.kv.tiers.counters import Counters

logger = logging.getLogger(__name__)


class Writes:
    """Writes to one tier."""

    def __init__(
        self, tier: TierContract, access: Access, counts: Counters, capacity: Capacity
    ) -> None:
        self._tier, self._access, self._counts = tier, access, counts
        self._capacity = capacity

    def put(self, key: KVKey, chunk: StoredChunk) -> PutResult:
        """See ``Tier.put``."""
        if self._tier.policy.read_only:
            return PutResult(False)
        name = self._tier.name
        try:
            with self._access.to_write(key):
                self._tier._save(key, chunk)
        except RejectedError as rejection:
            self._counts.add("rejected")
            logger.debug("%s tier rejected %s: %s", name, key, rejection)
            return PutResult(False)
        except RefusedError as refusal:
            # One warning per tier: a capacity below one chunk would otherwise fill the log.
            first = self._counts.add("refused") == 1
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "%s tier refused %s: %s", name, key, refusal)
            return PutResult(False)
        except OSError as error:
            self._access.could_not_write("store %s", key, error)
            cause = self._access.last_failure if isinstance(error, OutError) else told(error)
            return PutResult(False, f"{name} tier: {cause}")
        return PutResult(True)

    def evict(self, key: KVKey) -> bool | None:
        """See ``Tier.evict``."""
        return self._remove(key, "evictions")

    def expire(self, key: KVKey) -> bool:
        """See ``Tier.expire``."""
        return bool(self._remove(key, "expired"))

    def _remove(self, key: KVKey, counter: str) -> bool | None:
        if self._tier.policy.read_only:
            return False
        try:
            with self._access.to_write(key):
                removed = self._tier._drop(key)
        except OSError as error:
            self._access.could_not_write("remove %s", key, error)
            return None
        if removed:
            self._capacity.freed(counter, 1)
        return removed
