"""Chunk KV and where it lives: codec, tiers, store."""

from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.fetch import Fetch
from cacheblend_rag.kv.lookup import Lookup, StoreMiss
from cacheblend_rag.kv.store import DamagedObject, TieredKVStore, VerifyReport
from cacheblend_rag.kv.tiers import (
    BytesTier,
    DeviceTier,
    DiskTier,
    Entry,
    HostTier,
    ObjectTier,
    RedisTier,
    StoredChunk,
    Tier,
    TierPolicy,
    Usage,
)

__all__ = [
    "FORMAT_VERSION",
    "BytesTier",
    "ChunkKV",
    "DamagedObject",
    "DeviceTier",
    "DiskTier",
    "Entry",
    "Fetch",
    "HostTier",
    "KVKey",
    "Lookup",
    "ObjectTier",
    "RedisTier",
    "StoreMiss",
    "StoredChunk",
    "Tier",
    "TierPolicy",
    "TieredKVStore",
    "Usage",
    "VerifyReport",
    "chunk_id",
    "fingerprint",
]
