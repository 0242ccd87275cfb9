"""Chunk KV: its stored format, the tiers that hold it, and the store over them."""

from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import Entry, Lookup, StoredChunk
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.kv.tiers.bytes import BytesTier
from cacheblend_rag.kv.tiers.disk import DiskTier
from cacheblend_rag.kv.tiers.host import DeviceTier, HostTier
from cacheblend_rag.kv.tiers.object import ObjectTier
from cacheblend_rag.kv.tiers.policy import TierPolicy, Usage
from cacheblend_rag.kv.tiers.redis import RedisTier
from cacheblend_rag.kv.whole_chunks import DamagedObject, VerifyReport

__all__ = [
    "FORMAT_VERSION",
    "BytesTier",
    "ChunkKV",
    "DamagedObject",
    "DeviceTier",
    "DiskTier",
    "Entry",
    "HostTier",
    "KVKey",
    "LayerSource",
    "Lookup",
    "ObjectTier",
    "RedisTier",
    "StoredChunk",
    "Tier",
    "TierPolicy",
    "TieredKVStore",
    "Usage",
    "VerifyReport",
    "chunk_id",
    "fingerprint",
]
