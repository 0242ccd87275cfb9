"""The contract of tiers: policy, counters, and the methods that a tier implements or overrides."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.mac import Mac
from cacheblend_rag.kv.reader import ChunkReader, WholeReader
from cacheblend_rag.kv.shared_chunk import PARTS_AT_ONCE
from cacheblend_rag.kv.stored_chunk import Entry, Read, StoredChunk

Write = Literal["through", "none"]
Admit = Literal["frequency", "always"]


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """How one tier is used; the same for every kind of tier.

    Args:
        capacity_bytes: capacity for chunk KV; None is without limit.
        ttl_seconds: time after which the tier's copy expires, counted from when the chunk was first
            stored; None is the store's own.
        write: whether puts are stored here (``through``) or not (``none``).
        promote: whether chunks found in a slower tier are kept here, too.
        admit: what a full tier accepts: ``frequency`` only chunks requested more often than those
            they would displace, ``always`` all, evicting the least recently used.
        timeout_seconds: an answer that takes longer counts as a failure; None is never.
        read_only: nothing here is written, removed, quarantined or marked as used.

    Raises:
        StoreError: when a field is out of range.
    """

    capacity_bytes: int | None = None
    ttl_seconds: float | None = None
    write: Write = "through"
    promote: bool = True
    admit: Admit = "frequency"
    timeout_seconds: float | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.capacity_bytes is not None and self.capacity_bytes < 0:
            raise StoreError(f"capacity_bytes={self.capacity_bytes} must be at least 0")
        for name in ("ttl_seconds", "timeout_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise StoreError(f"{name}={seconds} must be above 0")
        for name, choices in (("write", get_args(Write)), ("admit", get_args(Admit))):
            if getattr(self, name) not in choices:
                raise StoreError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}"
                )

    @classmethod
    def of(cls, capacity_bytes: int | None, policy: TierPolicy | None) -> TierPolicy:
        """Return ``policy``, or the default for a capacity.

        Raises:
            StoreError: when both set the capacity.
        """
        if policy is None:
            return cls(capacity_bytes)
        if capacity_bytes is not None:
            raise StoreError("capacity_bytes= and policy= both set the capacity: give only policy=")
        return policy


@dataclass(frozen=True, slots=True)
class Usage:
    """A tier's current number of chunks and bytes."""

    entries: int
    nbytes: int


class TierContract(ABC):
    """The part of a tier that differs from other tiers.

    A new tier is a subclass of ``Tier``, which builds the methods for the store on these. It
    implements the abstract methods, and overrides others if it can do better. Methods with an
    underscore may raise OSError, which ``Tier`` turns into a miss or a failed put. All are called
    from several threads at once.

    name: shown in reports and stats. policy: how it is used. mac: the MAC of stored bytes.
    ttl_seconds: time after which copies expire, the lower one of the policy's and the store's.
    durable: whether chunks outlive this process, so that ``check`` has bytes to check.
    entries_at_once, reads_at_once: threads that look up and read many chunks; 1 if a thread costs
    more than it saves. parts_at_once: see SharedChunk's at_once. fails_whole: whether any failure
    affects the whole tier (a network's), not one chunk or only writing (a disk's). keeps_found:
    whether a chunk found in a slower tier is kept here, too. takes_puts: whether chunks put into
    the store are stored here. keeps_pins: whether pins outlive this process and hold for all
    processes that share the tier.
    """

    name: str
    policy: TierPolicy
    capacity_bytes: int | None
    mac: Mac
    ttl_seconds: float | None
    durable: ClassVar[bool] = True
    entries_at_once: ClassVar[int] = 8
    reads_at_once: ClassVar[int] = 8
    parts_at_once: ClassVar[int] = PARTS_AT_ONCE
    fails_whole: ClassVar[bool] = False
    keeps_pins: ClassVar[bool] = False
    keeps_found: bool = True
    takes_puts: bool = True

    @abstractmethod
    def _entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it; None when absent."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all stored chunks in any order; never called during a request."""

    def usage(self) -> Usage:
        """Count the stored chunks and bytes; may raise OSError. By default, they are listed."""
        sizes = {key: entry.nbytes for key, entry in self.entries()}
        return Usage(len(sizes), sum(sizes.values()))

    @abstractmethod
    def _load(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk and mark it used; None when absent.

        Raises DamagedChunkError and ForeignChunkError.
        """

    @abstractmethod
    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        """Store or replace a chunk, evicting those that the tier's ``_capacity`` names.

        Raises RefusedError, and the errors of its check.
        """

    @abstractmethod
    def _drop(self, key: KVKey) -> bool:
        """Remove a chunk; returns whether it was there."""

    def _open(self, key: KVKey) -> ChunkReader | None:
        """Open a chunk and mark it used; raises as ``_load``. By default, it loads the chunk.

        A tier that can read a chunk's head alone overrides this: whether to blend a prompt is
        decided from heads.
        """
        found = self._load(key)
        return None if found is None else WholeReader(found.kv, found.written_at)

    def _entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None] | None:
        """As ``_entry``, for many chunks, in their order.

        A tier overrides this if one request for all chunks is cheaper. By default, which is None,
        they are looked up one by one, on several threads.
        """
        return None

    def _load_many(self, keys: Sequence[KVKey]) -> list[Read | OSError] | None:
        """As ``_entry_many``, for ``_load``; an error stands in its chunk's place."""
        return None

    def _set_aside(self, key: KVKey, reason: str) -> None:
        """Keep the bytes for inspection if possible; by default they are dropped."""
        self._drop(key)

    def some_entries(self) -> Iterable[tuple[KVKey, Entry]]:
        """Return some of the stored chunks, others each time, to check whether they are expired.

        Empty by default, and for network tiers: their servers expire chunks, or expired chunks are
        removed when they are found.
        """
        return ()

    def check(self, key: KVKey) -> str | None:
        """Check a stored chunk; returns what is wrong with it, None if it is sound or gone."""
        return None

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace.

        Called at each miss, so a tier that would have to list its chunks returns False.
        """
        return False

    def would_take(self, key: KVKey, nbytes: int) -> bool:
        """Whether a chunk of so many bytes would probably be stored."""
        return True

    def release(self) -> int:
        """Free the memory of chunks here, if any; returns its bytes. Pinned chunks stay."""
        return 0

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to free
        """Free memory, files and connections."""


COUNTED = (
    "hits", "misses", "admitted", "rejected", "refused", "evictions", "expired", "quarantined",
    "errors", "skipped", "dropped",
)  # fmt: skip
"""skipped: reads that were skipped while the tier was out of use. dropped: writes that were skipped
so."""


class Counters:
    """Counters with the names in ``COUNTED``; safe to share between threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, times: int = 1) -> int:
        """Increase a counter; returns its value."""
        with self._lock:
            self._counts[name] += times
            return self._counts[name]

    def all(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTED}
