"""Tiers, fastest first: one file each, named here."""

from cacheblend_rag.kv.tiers.base import Entry, Read, StoredChunk, Tier, Usage
from cacheblend_rag.kv.tiers.bytes import BytesTier, StoredBytes
from cacheblend_rag.kv.tiers.disk import DiskTier
from cacheblend_rag.kv.tiers.host import HostTier
from cacheblend_rag.kv.tiers.policy import TierPolicy

__all__ = [
    "BytesTier",
    "DiskTier",
    "Entry",
    "HostTier",
    "Read",
    "StoredBytes",
    "StoredChunk",
    "Tier",
    "TierPolicy",
    "Usage",
]
