"""The figures of one tier: what it holds, and what was counted in this process."""

from __future__ import annotations

import logging

from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.breaker import OutError
from cacheblend_rag.kv.tiers.contract import TierContract, Usage
from cacheblend_rag.kv.tiers.counters import Counters

logger = logging.getLogger(__name__)


class TierStats:
    """Collects the figures of one tier."""

    def __init__(self, tier: TierContract, access: Access, counts: Counters) -> None:
        self._tier, self._access, self._counts = tier, access, counts

    def all(self) -> dict[str, int | None]:
        """See ``Tier.stats``."""
        usage = self._usage()
        return {
            "entries": None if usage is None else usage.entries,
            "bytes": None if usage is None else usage.nbytes,
            "capacity_bytes": self._tier.capacity_bytes,
            **self._counts.all(),
        }

    def _usage(self) -> Usage | None:
        try:
            with self._access.to_write():  # which may take a lock, as this does
                return self._tier.usage()
        except OSError as error:
            level = logging.DEBUG if isinstance(error, OutError) else logging.WARNING
            name = self._tier.name
            logger.log(level, "%s tier: could not count what is stored: %s", name, error)
            return None
