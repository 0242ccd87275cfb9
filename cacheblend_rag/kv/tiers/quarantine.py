"""Moves unusable chunks of one tier out of use."""

from __future__ import annotations

import logging

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.contract import TierContract
from cacheblend_rag.kv.tiers.counters import Counters

logger = logging.getLogger(__name__)


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
