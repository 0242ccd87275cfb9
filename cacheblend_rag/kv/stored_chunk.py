"""A stored chunk as tiers and the store exchange it, and the results of reading and storing one."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cacheblend_rag.errors import (
    BadSignatureError,
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.reason import Miss, Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class Entry:
    """A tier's record of a stored chunk, known without reading it; times are Unix seconds."""

    nbytes: int
    written_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk KV and when it was first written, which moving it between tiers does not change."""

    kv: ChunkKV
    written_at: float


Read = StoredChunk | StoreError | None
"""The result of reading one of several chunks: the chunk, an error, or None if absent."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a get: the chunk KV and its tier's name, or the reason of a miss.

    A ``store error`` names the tier that could not be read.
    """

    kv: ChunkKV | None
    tier: str | None
    reason: Reason | None


def miss_of(error: StoreError) -> Reason:
    """Return the miss reason for an error."""
    if isinstance(error, BadSignatureError):
        return Miss.BAD_SIGNATURE
    if isinstance(error, ForeignChunkError):
        return Miss.OTHER_MODEL
    if isinstance(error, DamagedChunkError):
        return Miss.DAMAGED
    cause = error.__cause__
    is_lack = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
    return Miss.NO_ROOM if is_lack else Miss.STORE_ERROR


STORE_FULL: Final = Reason(ReasonCode.STORE_FULL, "store full")
"""The reason if no tier failed, but none has or makes room."""
NOT_FINITE: Final = Reason(
    ReasonCode.NOT_FINITE, "its KV holds NaN or infinity, the model overflows"
)
"""The reason if a model computed NaN or infinity for the chunk."""
READ_ONLY: Final = Reason(
    ReasonCode.READ_ONLY,
    "the store is read only: store and evict where it is opened with read_only=False",
)
"""The reason if nothing may be stored or evicted."""
MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of storing a chunk; true if a tier took it.

    Args:
        stored: whether a tier took it.
        failure: the error that kept it from being stored, or, for a store with tiers that outlive
            the process, from being stored in any of those; "" when nothing failed.
        is_finite: whether the KV has neither NaN nor infinity.
    """

    stored: bool
    failure: str = ""
    is_finite: bool = True

    def __bool__(self) -> bool:
        return self.stored

    @property
    def refusal(self) -> Reason | None:
        """Why later processes will not find the chunk, in one line; None if they will."""
        if not self.is_finite:
            return NOT_FINITE
        if self.failure:
            return Reason(ReasonCode.STORE_ERROR, self.failure)
        return None if self.stored else STORE_FULL

    @classmethod
    def of_tiers(cls, results: Sequence[tuple[bool, PutResult]]) -> PutResult:
        """Combine the results of several tiers.

        Args:
            results: for each tier, whether it outlives the process, and its result.

        Returns:
            Stored if any tier took it. A tier's failure counts unless another tier that outlives
            the process took the chunk, or no tier outlives it and any took it.
        """
        lasting = [result for durable, result in results if durable]
        is_kept = any(lasting or [result for _, result in results])
        failures = [result.failure for _, result in results if result.failure]
        return cls(any(result for _, result in results), "" if is_kept else "; ".join(failures))


def told(error: BaseException) -> str:
    """Return an error in one short line, without the file's name that an OSError carries."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:MOST_CHARACTERS].rstrip(".")
