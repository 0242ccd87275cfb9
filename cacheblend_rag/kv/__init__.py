"""Chunk KV: its stored format, the tiers that hold it, and the store over them."""

from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import Lookup
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
