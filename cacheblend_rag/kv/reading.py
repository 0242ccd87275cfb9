"""Shares lookups and reads of chunks between prompts, and bounds what is read ahead."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from weakref import WeakValueDictionary

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.expiry import Expiry
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.opening import Opening, Search, TierThreads, Way
from cacheblend_rag.kv.reader import ChunkReader, WholeReader
from cacheblend_rag.kv.shared_chunk import Found, Part, SharedChunk
from cacheblend_rag.kv.stored_chunk import StoredChunk, miss_of
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.reason import Miss

ROOM_AHEAD_BYTES = 512 << 20
"""Bytes of layers that all running prompts may read ahead, besides the tiers' memory."""
WANTED_BYTES = 1 << 30
"""Bytes of chunks that are kept for waiting requests, besides the tiers' memory."""

_KEEPING = [Way(True, unpacks) for unpacks in (True, False)]
_WAYS = [*_KEEPING, *(Way(False, unpacks) for unpacks in (True, False))]


class SharedReads:
    """The reads of all prompts from a store's tiers.

    No lock is held while a tier is asked: storing or evicting a chunk meanwhile, in this tier or
    another one, makes the lookup stale, and its result is not kept.

    room: bytes for layers that are read ahead.
    """

    def __init__(
        self, tiers: Sequence[Tier], expiry: Expiry, locks: KeyLocks, threads: TierThreads
    ) -> None:
        self._tiers, self._expiry, self._locks, self._threads = tiers, expiry, locks, threads
        self.room = Budget(ROOM_AHEAD_BYTES)
        self._wanted, self._kept = Counter[KVKey](), dict[KVKey, SharedChunk]()
        self._keeping = threading.Lock()
        self._opening = Opening(tiers, threads, self._open_in)
        self._open: WeakValueDictionary[tuple[KVKey, Way], SharedChunk] = WeakValueDictionary()

    def begin_open(self, key: KVKey, way: Way) -> Future[Found]:
        """Begin to look a chunk up, or join a running lookup."""
        if way.promotes:
            self.see([key])
        return self._opening.begin(key, way)

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count accesses in all tiers, so that slower ones keep popular chunks, too."""
        seen = list(dict.fromkeys(keys))
        for tier in self._tiers:
            tier.see(seen)

    @contextmanager
    def wanting(self, keys: Iterable[KVKey]) -> Iterator[None]:
        """Announce that a request will read chunks, until the context ends.

        What is read meanwhile of a chunk that several requests have announced is kept for all of
        them, up to WANTED_BYTES besides the tiers' memory: a full tier may turn it away.
        """
        own = Counter(dict.fromkeys(keys, 1))
        with self._keeping:
            self._wanted += own
        try:
            yield
        finally:
            with self._keeping:
                self._wanted -= own
                for key in own.keys() - self._wanted.keys():
                    self._kept.pop(key, None)

    def _keep(self, key: KVKey, chunk: SharedChunk) -> bool:
        """Keep what is read of a chunk if several requests want it, and there is room."""
        with self._keeping:
            kept = sum(one.nbytes for one in self._kept.values())
            if self._wanted[key] < 2 or kept + chunk.nbytes > WANTED_BYTES:
                return False
            chunk.hold()
            self._kept[key] = chunk
        return True

    def begin_read(self, tier: str, work: Callable[[], Part]) -> Future[Part]:
        """Read a part of a chunk on threads of the named tier."""
        return self._threads.submit(tier, work)

    @contextmanager
    def changing(self, key: KVKey) -> Iterator[None]:
        """Wrap a change of a chunk, so that new readers do not join reads of the old version.

        Before the change and once more after it: a reader in between may have seen either version.
        """
        self._part_with(key)
        try:
            yield
        finally:
            self._part_with(key)

    def _open_in(self, depth: int, search: Search) -> Found | None:
        """Open a chunk in one tier, or join its running read; None if it is absent."""
        tier, key, way = self._tiers[depth], search.key, search.way
        shared = self._open.get((key, way))
        if (
            shared is not None
            and shared.failure is None
            and shared.tier == tier.name
            and not self._expiry.is_past(tier, key, shared.reader.written_at)
        ):
            return Found(shared, None)
        opened = tier.open(key)
        if opened is None:
            return None
        if isinstance(opened, StoreError):
            reason = miss_of(opened)
            return Found(None, reason, tier.name if reason == Miss.STORE_ERROR else None)
        if self._expiry.is_past(tier, key, opened.written_at):
            self._expiry.remove_opened(tier, key)
            return None
        return Found(self._shared(search, depth, opened), None)

    def _shared(self, search: Search, depth: int, reader: ChunkReader) -> SharedChunk:
        """Return the shared read of a chunk, which is kept in faster tiers once it is whole."""
        tier, above = self._tiers[depth], self._tiers[:depth]
        key, way = search.key, search.way
        if isinstance(reader, WholeReader):
            if way.promotes and above:
                self._keep_found(search, depth, StoredChunk(reader.kv, reader.written_at))
            shared = SharedChunk(reader, tier.name, reader.read, unpacks=way.unpacks)
        else:
            keeps = way.promotes and any(other.keeps_found for other in above)
            shared = SharedChunk(
                reader,
                tier.name,
                partial(tier.read_layers, key, reader),
                partial(self._keep_read, key, depth, reader) if keeps else None,
                at_once=tier.parts_at_once,
                unpacks=way.unpacks,
            )
        is_of_memory = reader.in_memory and depth == 0 and not tier.durable
        is_kept = not is_of_memory and self._keep(key, shared)
        if reader.in_memory and not shared.only_unpacks and not is_kept:
            return shared
        self._open[key, way] = shared
        if not self._opening.is_current(search):  # after the insertion, which later changes see
            self._open.pop((key, way), None)
            self._kept.pop(key, None)
        return shared

    def _keep_found(self, search: Search, depth: int, chunk: StoredChunk) -> None:
        """Keep a chunk in faster tiers, unless it is evicted, replaced or worked on meanwhile."""
        with self._locks.tried(search.key) as is_held:
            if is_held and self._opening.is_current(search):
                keep_in(self._tiers[:depth], search.key, chunk)

    def _keep_read(self, key: KVKey, depth: int, reader: ChunkReader, kv: ChunkKV) -> None:
        """As _keep_found, for a chunk that was read layer by layer."""
        with self._locks.tried(key) as is_held:
            read = [self._open.get((key, way)) for way in _KEEPING]
            is_current = any(shared is not None and shared.reader is reader for shared in read)
            if is_held and is_current:
                keep_in(self._tiers[:depth], key, StoredChunk(kv, reader.written_at))

    def _part_with(self, key: KVKey) -> None:
        """Let no new reader join reads of a chunk that was replaced or evicted."""
        self._opening.part_with([key], _WAYS)
        self._kept.pop(key, None)
        for way in _WAYS:
            self._open.pop((key, way), None)


def keep_in(tiers: Sequence[Tier], key: KVKey, chunk: StoredChunk) -> None:
    """Keep a chunk that was found in a slower tier in these tiers, except those that opt out."""
    for tier in tiers:
        if tier.keeps_found:
            tier.put(key, chunk)


class Reservation:
    """A part of a budget, released explicitly or when this object is garbage-collected.

    So an interrupt at any point releases it, too.
    """

    __slots__ = ("_of", "size")

    def __init__(self, of: Budget) -> None:
        self._of, self.size = of, 0

    def give_back(self, _: object = None) -> None:
        """Release it, once; can be used as a future's done callback."""
        self._of.regain(self)

    def __del__(self) -> None:
        self.give_back()


class Budget:
    """Bytes that all prompts share. left: those that are free."""

    def __init__(self, size: int) -> None:
        # Reentrant: a reservation may be collected, and given back, while its thread holds it.
        self.left, self._lock = size, threading.RLock()

    def take(self, size: int, *, anyway: bool = False) -> Reservation | None:
        """Reserve an amount; None if there is less left.

        anyway: reserve it even if there is less left, since it is needed now.
        """
        taken = Reservation(self)
        with self._lock:
            if size > self.left and not anyway:
                return None
            # Both or neither: no interrupt comes between two assignments.
            self.left -= size
            taken.size = size
        return taken

    def regain(self, taken: Reservation) -> None:
        """Return a reserved amount."""
        with self._lock:
            self.left += taken.size
            taken.size = 0
