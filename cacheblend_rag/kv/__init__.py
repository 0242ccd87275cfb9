"""Chunk KV and where it lives: codec, tiers, store."""

from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.fetch import Fetch
from cacheblend_rag.kv.lookup import Lookup, StoreMiss
from cacheblend_rag.kv.store import DamagedObject, TieredKVStore, VerifyReport
from cacheblend_rag.kv.tiers import (
    BytesTier,
    DiskTier,
    Entry,
    HostTier,
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
    "DiskTier",
    "Entry",
    "Fetch",
    "HostTier",
    "KVKey",
    "Lookup",
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
