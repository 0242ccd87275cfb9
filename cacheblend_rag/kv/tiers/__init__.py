"""The tiers of a store, one file each, fastest first."""

from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.kv.tiers.bytes import BytesTier
from cacheblend_rag.kv.tiers.contract import TierPolicy, Usage
from cacheblend_rag.kv.tiers.disk import DiskTier
from cacheblend_rag.kv.tiers.host import DeviceTier, HostTier
from cacheblend_rag.kv.tiers.object import ObjectTier
from cacheblend_rag.kv.tiers.redis import RedisTier

__all__ = [
    "BytesTier",
    "DeviceTier",
    "DiskTier",
    "Entry",
    "HostTier",
    "ObjectTier",
    "Read",
    "RedisTier",
    "StoredBytes",
    "StoredChunk",
    "Tier",
    "TierPolicy",
    "Usage",
]
