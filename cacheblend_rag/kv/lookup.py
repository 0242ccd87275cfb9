"""The result of reading one chunk from a store."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV

StoreMiss = Literal[
    "not stored", "damaged", "other model", "bad signature", "store error", "no room"
]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a get: the chunk KV and its tier's name, or the reason of a miss.

    A ``store error`` names the tier that could not be read.
    """

    kv: ChunkKV | None
    tier: str | None
    reason: StoreMiss | None

    @classmethod
    def missed(cls, reason: StoreMiss, tier: str | None = None) -> Lookup:
        """Return the result for a chunk that was not found."""
        return cls(None, tier, reason)


def miss_of(error: StoreError) -> StoreMiss:
    """Return the miss reason for an error."""
    if isinstance(error, BadSignatureError):
        return "bad signature"
    if isinstance(error, ForeignChunkError):
        return "other model"
    if isinstance(error, DamagedChunkError):
        return "damaged"
    cause = error.__cause__
    is_lack = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
    return "no room" if is_lack else "store error"
