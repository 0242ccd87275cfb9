"""What a tier implements: where chunk KV is kept, and how it is found, stored and removed there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.mac import Mac
from cacheblend_rag.kv.reader import ChunkReader, WholeReader
from cacheblend_rag.kv.shared_chunk import PARTS_AT_ONCE
from cacheblend_rag.kv.stored_chunk import Entry, StoredChunk
from cacheblend_rag.kv.tiers.policy import TierPolicy


@dataclass(frozen=True, slots=True)
class Usage:
    """A tier's current number of chunks and bytes."""

    entries: int
    nbytes: int


class TierContract(ABC):
    """One place where chunk KV is kept, as far as it differs from other places.

    A new tier is a subclass of ``Tier``, which makes of this what a store asks. It implements the
    abstract methods and overrides others where it can do better. Whatever has an underscore may
    raise OSError, which ``Tier`` turns into a miss or a failed put. All are called from several
    threads at once.

    name: shown in reports and stats. policy: how it is used. seal: what vouches for stored bytes.
    ttl_seconds: age at which copies are gone, the policy's or that of the store which the tier is
    in, the lower one. durable: whether chunks outlive this process, so that ``check`` has bytes to
    check. entries_at_once, reads_at_once: threads that look up and read many chunks; 1 where a
    thread costs more than it saves. parts_at_once: see SharedChunk's at_once. fails_whole: whether
    any failure is one of the tier as a whole (a network's), not of one chunk or of writing alone (a
    disk's). keeps_found: whether a chunk found in a slower tier is kept here, too. takes_puts:
    whether what is put into the store is stored here. keeps_pins: whether pins outlive this process
    and are honoured by all that share the tier.
    """

    name: str
    policy: TierPolicy
    capacity_bytes: int | None
    seal: Mac
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

    @abstractmethod
    def usage(self) -> Usage:
        """Count what is stored."""

    @abstractmethod
    def _load(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk and mark it used; None when absent.

        Raises DamagedChunkError and ForeignChunkError.
        """

    @abstractmethod
    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        """Store or replace a chunk, evicting others.

        Raises RefusedError, and what its check raises.
        """

    @abstractmethod
    def _drop(self, key: KVKey) -> bool:
        """Remove a chunk; returns whether it was there."""

    def _open(self, key: KVKey) -> ChunkReader | None:
        """Open a chunk and mark it used; raises as ``_load``, which is asked for all of it here."""
        found = self._load(key)
        return None if found is None else WholeReader(found.kv, found.written_at)

    def _set_aside(self, key: KVKey, reason: str) -> None:
        """Keep the bytes for inspection if possible; by default they are dropped."""
        self._drop(key)

    def some_entries(self) -> Iterable[tuple[KVKey, Entry]]:
        """Return some of the stored chunks, others each time, to be looked at for their age.

        None where that takes a network: its servers let go of what is past its time, or it is
        removed when it is found.
        """
        return ()

    def check(self, key: KVKey) -> str | None:
        """Check a stored chunk; returns what is wrong with it, None if it is sound or gone."""
        return None

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace.

        Asked at each miss, so a tier that cannot tell without listing what it holds says no.
        """
        return False

    def would_take(self, key: KVKey, nbytes: int) -> bool:
        """Whether a chunk of so many bytes would probably be stored."""
        return True

    def release(self) -> int:
        """Free the memory that chunks take here, where they do; returns its bytes.

        Pinned chunks stay, and those that are not written yet.
        """
        return 0

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to let go of
        """Free memory, files and connections."""
