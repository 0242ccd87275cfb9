"""Lookup: what reading one chunk from a store came to."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.errors import (
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
    UnsealedChunkError,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV

StoreMiss = Literal["not stored", "damaged", "other model", "unsealed", "store error", "no room"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a get found: the chunk KV and its tier's name, or the reason why there is none.

    A ``store error`` names the tier that could not be read.
    """

    kv: ChunkKV | None
    tier: str | None
    reason: StoreMiss | None

    @classmethod
    def missed(cls, reason: StoreMiss, tier: str | None = None) -> Lookup:
        """Return what is known of a chunk that was not found."""
        return cls(None, tier, reason)


def miss_of(error: StoreError) -> StoreMiss:
    """Say in a word why a chunk could not be had."""
    if isinstance(error, UnsealedChunkError):
        return "unsealed"
    if isinstance(error, ForeignChunkError):
        return "other model"
    if isinstance(error, DamagedChunkError):
        return "damaged"
    cause = error.__cause__
    is_lack = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
    return "no room" if is_lack else "store error"
