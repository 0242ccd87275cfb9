"""A stored chunk in the form that tiers and the store exchange, and the result of reading one."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.packed_kv import StoredKV
from cacheblend_rag.report import MissReason


@dataclass(frozen=True, slots=True)
class Entry:
    """A tier's record of a stored chunk, known without reading it; times are Unix seconds."""

    nbytes: int
    written_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk KV and when it was first written, which moving it between tiers does not change.

    check: checks the numbers, or does nothing if that was done, as when they were read. A tier
    calls it before the chunk can be found there; writing may run at the same time.
    """

    kv: StoredKV
    written_at: float
    check: Callable[[], None] = lambda: None


Read = StoredChunk | StoreError | None
"""The result of reading one of several chunks: the chunk, an error, or None if absent."""


def first_stored_at(told: float | None) -> float:
    """Return when a chunk was first stored: the given time if it is possible, else now."""
    if told is None or not math.isfinite(told):
        return time.time()
    return max(told, 0.0)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a get: the chunk KV and its tier's name, or the reason of a miss.

    A ``store error`` names the tier that could not be read.
    """

    kv: ChunkKV | None
    tier: str | None
    reason: MissReason | None

    @classmethod
    def missed(cls, reason: MissReason, tier: str | None = None) -> Lookup:
        """Return the result for a chunk that was not found."""
        return cls(None, tier, reason)


def miss_of(error: StoreError) -> MissReason:
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
