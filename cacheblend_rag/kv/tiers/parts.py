"""The objects behind the methods of one tier."""

from __future__ import annotations

from cacheblend_rag.kv.tiers.access import Access
from cacheblend_rag.kv.tiers.capacity import Capacity
from cacheblend_rag.kv.tiers.contract import TierContract
from cacheblend_rag.kv.tiers.counters import Counters
from cacheblend_rag.kv.tiers.lookups import Lookups
from cacheblend_rag.kv.tiers.quarantine import Quarantine
from cacheblend_rag.kv.tiers.reads import Reads
from cacheblend_rag.kv.tiers.stats import TierStats
from cacheblend_rag.kv.tiers.writes import Writes


class TierParts:
    """Creates the objects of one tier; they share its access and its counters."""

    def __init__(self, tier: TierContract) -> None:
        counts = Counters()
        self.access = access = Access(tier, counts)
        self.capacity = Capacity(tier.policy, counts)
        self.writes = Writes(tier, access, counts, self.capacity)
        self.lookups = Lookups(tier, access)
        self.quarantine = Quarantine(tier, access, counts)
        self.reads = Reads(tier, access, counts, self.quarantine)
        self.stats = TierStats(tier, access, counts)
