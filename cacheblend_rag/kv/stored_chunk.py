"""A stored chunk in the form that tiers and the store exchange."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.packed_kv import StoredKV


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
