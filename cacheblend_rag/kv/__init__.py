"""Chunk KV and where it lives: codec, tiers, store."""

from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.store import (
    DamagedObject,
    Lookup,
    StoreMiss,
    TieredKVStore,
    VerifyReport,
)
from cacheblend_rag.kv.tiers import DiskTier, Entry, HostTier, StoredChunk, Tier, Usage

__all__ = [
    "FORMAT_VERSION",
    "ChunkKV",
    "DamagedObject",
    "DiskTier",
    "Entry",
    "HostTier",
    "KVKey",
    "Lookup",
    "StoreMiss",
    "StoredChunk",
    "Tier",
    "TieredKVStore",
    "Usage",
    "VerifyReport",
    "chunk_id",
    "fingerprint",
]
