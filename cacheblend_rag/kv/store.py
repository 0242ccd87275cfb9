"""TieredKVStore: chunk KV in several tiers, fastest first, looked up and stored as one."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Self
from weakref import ReferenceType, WeakSet, WeakValueDictionary, ref

import torch

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.access_log import AccessLog, FoundChunks
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, NotFiniteError, NumbersCheck
from cacheblend_rag.kv.fetch import ByteBudget, Found, LayerSource, Slots, miss_of
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.lookup import Lookup
from cacheblend_rag.kv.mac import CHECKSUM, Mac, seal_of
from cacheblend_rag.kv.opening import Opening, Search, TierThreads, Way
from cacheblend_rag.kv.packed_kv import StoredKV, packed, unpacked
from cacheblend_rag.kv.put_result import PutResult
from cacheblend_rag.kv.reader import ChunkReader, WholeReader
from cacheblend_rag.kv.shared_chunk import SharedChunk
from cacheblend_rag.kv.speed import Speeds
from cacheblend_rag.kv.tiers import DiskTier, Entry, HostTier, Read, StoredChunk, Tier
from cacheblend_rag.kv.tiers.policy import TierPolicy
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings import Precision, StoreConfig

PREFETCH_THREADS = 2
FETCH_THREADS = 16
"""Reads of one tier at once, for all prompts on their way."""
ASKED_AT_ONCE = 64
"""Chunks that tiers are asked for together before they are prefetched."""
FETCHED_AHEAD = 32
"""Chunks read before they are taken, of all prompts on their way: memory beside the tiers'."""
ROOM_AHEAD_BYTES = 512 << 20
"""Layers read before they are used, of all prompts on their way: memory beside the tiers'."""
READ_ONLY = "the store is read only: store and evict where it is opened with read_only=False"
SWEEP_SECONDS = 1.0
"""How often, while the store is used, a part of it is looked through for what is past its time."""
CLOCK_SKEW_SECONDS = 300.0
"""How far machines' clocks may lie apart: what is written later than that is expired, too."""

_KEEPING = [Way(True, unpacks) for unpacks in (True, False)]
_WAYS = [*_KEEPING, *(Way(False, unpacks) for unpacks in (True, False))]


@dataclass(frozen=True, slots=True)
class _Got:
    """What a get came to: what its tier has, or why there is nothing."""

    chunk: StoredChunk | None
    lookup: Lookup

    @property
    def unpacked(self) -> Lookup:
        """The same with the chunk's numbers, for whoever asked."""
        if self.chunk is None:
            return self.lookup
        return replace(self.lookup, kv=unpacked(self.chunk.kv))


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """One stored object that failed its check."""

    tier: str
    key: KVKey
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify did. checked: objects read. expired: removed as past their time to live."""

    checked: int
    expired: int
    damaged: tuple[DamagedObject, ...]


class TieredKVStore:
    """Chunk KV under keys, over tiers from fastest to slowest. Safe to share between threads.

    A get tries the tiers in order and keeps what it found lower down in the tiers before, a put
    writes to all of them, but for tiers that say otherwise (``keeps_found``, ``takes_puts``). No
    method that a request needs raises because of storage: damage, a full disk or a foreign file is
    a miss or a failed put; and none lists a tier. Pins hold in this process: they exempt a chunk
    from eviction by capacity and by age.

    Args:
        tiers: from fastest to slowest, each with a name of its own.
        ttl_seconds: age since it was first stored at which a chunk is gone, None is never; a tier's
            own policy may say less.
        precision: to which the numbers of what is put are rounded, see kv/precision.py.
        seal: what vouches for stored bytes, see kv/mac.py.

    Raises:
        StoreError: when there is no tier, two have one name, or the age is not above 0.

    Attributes:
        tiers, ttl_seconds, precision, seal: as given.
        access_log: where it is noted what prompts ask for, or None.
        speeds: how fast tiers were read lately, noted by whoever waits for them.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        ttl_seconds: float | None = None,
        precision: Precision = "native",
        seal: Mac = CHECKSUM,
    ) -> None:
        if not tiers:
            raise StoreError("a store needs at least one tier")
        names = [tier.name for tier in tiers]
        if len(set(names)) != len(names):
            raise StoreError(f"tiers {', '.join(names)} must have names of their own")
        if ttl_seconds is not None and ttl_seconds <= 0:
            raise StoreError(f"ttl_seconds={ttl_seconds} must be above 0")
        self.tiers = tuple(tiers)
        self.ttl_seconds = ttl_seconds
        self.precision, self.seal = precision, seal
        for tier in self.tiers:
            tier.seal = seal
            tier.ttl_seconds = self._ttl(tier)
        self._pinned: set[KVKey] = set()
        self.access_log: AccessLog | None = None
        self.speeds = Speeds()
        self._swept_at = time.monotonic()
        self._begin_threads()
        _stores.add(self)

    def _begin_threads(self) -> None:
        """Make all that threads share, in a new store and in a process that was forked."""
        self._locks = KeyLocks()
        self._pool = ThreadPoolExecutor(PREFETCH_THREADS, thread_name_prefix="kv-prefetch")
        self._threads = TierThreads(self.tiers, FETCH_THREADS)
        self._opening = Opening(self.tiers, self._threads, self._open_in)
        self._room_ahead = Slots(FETCHED_AHEAD)
        self._room = ByteBudget(ROOM_AHEAD_BYTES)
        self._closing = threading.Event()
        self._reading: WeakValueDictionary[tuple[KVKey, Way], SharedChunk] = WeakValueDictionary()
        if any(self._sweeps(tier) for tier in self.tiers):
            told = (ref(self), self._closing)
            with suppress(RuntimeError):  # the system has no thread left: swept when it is used
                Thread(target=_sweep_until, args=told, name="kv-sweep", daemon=True).start()

    def after_fork(self) -> None:
        """Begin anew in a forked process; nothing there waits for threads of its parent's.

        Called by itself. What waits to be written, and what prompts are reading, is the parent's.
        """
        for tier in self.tiers:
            tier.after_fork()
        if self.access_log is not None:
            self.access_log.after_fork()
        self.speeds = Speeds()
        self._begin_threads()

    @classmethod
    def open(
        cls,
        *,
        host_bytes: int | None = 4 << 30,
        disk_path: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        ttl_seconds: float | None = None,
        read_only: bool = False,
        precision: Precision = "native",
    ) -> TieredKVStore:
        """Return a store in memory, on disk, or both.

        Args:
            host_bytes: memory for chunk KV; None is without limit, 0 keeps nothing in memory.
            disk_path: folder shared between processes and runs; None keeps nothing on disk.
            disk_bytes: room for chunk KV there; None is without limit.
            ttl_seconds: age since it was first stored at which a chunk is gone, None is never.
            read_only: whether the folder is only read; memory is used as ever.
            precision: to which the numbers of what is put are rounded.

        Raises:
            StoreError: when there is neither memory nor disk, or the folder is unusable.
        """
        tiers: list[Tier] = []
        if host_bytes != 0:
            tiers.append(HostTier(host_bytes))
        if disk_path is not None:
            policy = TierPolicy(disk_bytes, read_only=read_only)
            tiers.append(DiskTier(disk_path, policy=policy))
        return cls(tiers, ttl_seconds=ttl_seconds, precision=precision, seal=seal_of())

    @classmethod
    def of(cls, config: StoreConfig, *, device: torch.device | str = "cpu") -> TieredKVStore:
        """Return the store that a StoreConfig describes.

        Args:
            config: where chunk KV is kept.
            device: where the engine computes, which is where a device tier keeps it.

        Raises:
            StoreError: when there is neither memory nor disk, a tier cannot be opened, or the
                access log is no regular file.
            MissingExtraError: when a tier's library is not there.
        """
        log = None if config.access_log is None else AccessLog(config.access_log)
        if log is not None:
            log.check()
        store = cls._of(config, device)
        if log is not None:
            store.follow(log)
        return store

    @classmethod
    def _of(cls, config: StoreConfig, device: torch.device | str) -> TieredKVStore:
        if config.tiers is not None:
            tiers = [open_tier(url, device, read_only=config.read_only) for url in config.urls]
            return cls(
                tiers, ttl_seconds=config.ttl_seconds, precision=config.precision, seal=seal_of()
            )
        return cls.open(
            host_bytes=config.host_bytes,
            disk_path=config.kv_path,
            disk_bytes=config.disk_bytes,
            ttl_seconds=config.ttl_seconds,
            read_only=config.read_only,
            precision=config.precision,
        )

    def follow(self, log: AccessLog) -> None:
        """Note in ``log`` what prompts find here, and prefetch what it says most asked for."""
        self.access_log = log
        self._pool.submit(lambda: self.prefetch(log.most_used(self._closing.is_set)))

    @property
    def read_only(self) -> bool:
        """Whether a tier is only read, so that nothing is stored or evicted for good."""
        return any(tier.policy.read_only for tier in self.tiers)

    def contains(self, key: KVKey) -> bool:
        """Whether any tier holds the chunk; reads no tensors."""
        return self._entry(key) is not None

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace.

        As far as tiers can tell without listing what they hold.
        """
        return any(tier.has_relative(key) for tier in self.tiers)

    def absence(self, key: KVKey) -> Lookup:
        """Say why a chunk is not there, without reading.

        Returns:
            A miss: a tier fails, another model's KV of the chunk is stored, or nothing.
        """
        for tier in self.tiers:
            if tier.is_failing:
                return Lookup.missed("store error", tier.name)
        return Lookup.missed("other model" if self.has_relative(key) else "not stored")

    def contains_many(self, keys: Iterable[KVKey]) -> list[bool]:
        """As contains, for many keys at once: each tier is asked once.

        Returns:
            Whether each is stored, in the order of the keys.
        """
        wanted = list(keys)
        held = self._held(wanted)
        return [key in held for key in wanted]

    def nbytes(self, key: KVKey) -> int | None:
        """Return a chunk's stored size in its fastest tier, None when it is not stored."""
        entry = self._entry(key)
        return None if entry is None else entry.nbytes

    def get(self, key: KVKey, *, promote: bool = True) -> Lookup:
        """Read one chunk from the fastest tier that has it; the tensors must not be written to.

        Args:
            key: the chunk to read.
            promote: keep a copy found lower down in the tiers before that keep such; without it
                nothing is retained.

        Returns:
            The chunk and its tier, or the reason why there is none.
        """
        return self.get_many([key], promote=promote)[0]

    def get_many(self, keys: Iterable[KVKey], *, promote: bool = True) -> list[Lookup]:
        """As get, for many keys at once, in their order: each tier is asked once for all of them.

        All of them are in memory together; ``fetch`` reads a prompt's chunks a few at a time.

        Args:
            keys: chunks to read; one that is named twice is read once.
            promote: as for get.

        Returns:
            A lookup a key.
        """
        wanted = list(keys)
        if promote:
            self._see(wanted)
        with self._locks.held(*wanted):
            found = self._get_many(wanted, promote)
        lookups = {key: got.unpacked for key, got in found.items()}
        return [lookups[key] for key in wanted]

    def fetch(
        self, keys: Iterable[KVKey], *, promote: bool = True, unpack: bool = True
    ) -> LayerSource:
        """Begin to read chunks, to be taken layer by layer; returns at once.

        Whoever reads the same chunk at the same time reads it together.

        Args:
            keys: the chunks of one prompt.
            promote: as for get; a chunk is kept once all of its layers were read.
            unpack: whether layers are handed out as numbers of the model's type; without it, those
                of a chunk that is stored a byte a number are handed out as they are stored.

        Returns:
            What hands the layers out; to be closed by whoever may not take them all.
        """
        self._sweep_now_and_then()
        keys, way, log = list(keys), Way(promote, unpack), self.access_log
        found = FoundChunks(keys, partial(self._note, log)) if promote and log else None

        def begin_open(key: KVKey) -> Future[Found]:
            opened = self._begin_open(key, way)
            return opened if found is None else found.watch(key, opened)

        return LayerSource(
            keys, begin_open, self._threads.submit, self._room_ahead,
            self._room,
        )  # fmt: skip

    def put(self, key: KVKey, kv: ChunkKV, *, written_at: float | None = None) -> PutResult:
        """Store a chunk in every tier that takes puts, fastest first.

        Args:
            key: the name it is stored under.
            kv: the chunk KV; its tensors must not be written to afterwards.
            written_at: when it was first stored, a Unix time; None is now, and so is what cannot
                be.

        Returns:
            Whether any tier took it (it is true then), and what failed where that lost it.

        Raises:
            ValueError: when the tensors are not as ChunkKV promises.
        """
        self._sweep_now_and_then()
        kv.check_form()
        check = NumbersCheck(kv)
        chunk = StoredChunk(packed(kv, self.precision), _time_of(written_at), check)
        self._see([key])
        with self._locks.held(key), self._changing(key):
            taken = _put_all(self.tiers, key, chunk)
        check()  # whether or not a tier has: what is asked for does not depend on the tiers
        return taken

    def put_computed(self, key: KVKey, kv: ChunkKV) -> PutResult:
        """Store what a model computed: as put, but NaN and infinity are refused, not an error.

        A model whose activations overflow in 16 bits computes such.

        Args:
            key: the name it is stored under.
            kv: the chunk KV; its tensors must not be written to afterwards.

        Returns:
            As put.
        """
        try:
            return self.put(key, kv)
        except NotFiniteError:
            return PutResult(False, is_finite=False)

    def evict(self, key: KVKey) -> bool:
        """Remove a chunk from all tiers, pinned or not; returns whether it was stored.

        Raises:
            StoreError: when the store is read only: the chunk would come back.
        """
        self._check_writable()
        with self._locks.held(key), self._changing(key):
            evicted = [tier.evict(key) for tier in self.tiers]
        return any(evicted)

    def forget(self, keys: Iterable[KVKey]) -> None:
        """Remove chunks from this process' memory alone: others have evicted them elsewhere.

        Args:
            keys: chunks, stored or not.
        """
        for key in keys:
            with self._locks.held(key), self._changing(key):
                for tier in self.tiers:
                    if not tier.durable:
                        tier.evict(key)

    def release(self) -> int:
        """Free the memory of this process that chunk KV takes; returns how many bytes.

        What slower tiers hold stays there, and so does what waits to be written to them, which is
        found until it is. Pinned chunks stay. What a prompt is reading is freed once it was read;
        what is in no other tier is gone, as if it had been evicted.
        """
        return sum(tier.release() for tier in self.tiers)

    def evict_where(self, condition: Callable[[KVKey, Entry], bool]) -> int:
        """Evict all chunks for which ``condition`` holds; returns how many.

        Raises:
            StoreError: when the store is read only.
        """
        self._check_writable()
        doomed = [key for key, entry in self.entries().items() if condition(key, entry)]
        return sum(self.evict(key) for key in doomed)

    def evict_expired(self) -> int:
        """Remove the copies past their time to live from all tiers; returns how many."""
        return sum(
            self._expire(tier, key)
            for tier in self.tiers
            for key, entry in _entries_of(tier)
            if self._is_expired(tier, key, entry)
        )

    def pin(self, key: KVKey) -> None:
        """Never evict this chunk for capacity or age, from now on, stored yet or not."""
        self._pinned.add(key)
        for tier in self.tiers:
            tier.pin(key)

    def unpin(self, key: KVKey) -> None:
        """Undo pin."""
        self._pinned.discard(key)
        for tier in self.tiers:
            tier.unpin(key)

    def promote(self, key: KVKey) -> bool:
        """Bring a chunk into the fastest tier; returns whether it is there now."""
        with self._locks.held(key):
            self._get_many([key], promote=True)
            return self.tiers[0].contains(key)

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Start loading chunks into the fastest tier, as many as fit; returns at once.

        A get for one of them waits for its load rather than loading it again. What memory would
        turn away is left where it is.
        """
        fastest, room = self.tiers[0], self.tiers[0].capacity_bytes
        wanted = list(dict.fromkeys(keys))
        for start in range(0, len(wanted), ASKED_AT_ONCE):
            if self._closing.is_set():
                return
            some = wanted[start : start + ASKED_AT_ONCE]
            lacking = [key for key in some if not fastest.contains(key)]
            held = self._held(lacking)
            for key in lacking:
                entry = held.get(key)
                if entry is None or not self._is_kept(key, entry.nbytes):
                    continue
                if room is not None and (room := room - entry.nbytes) < 0:
                    return
                with suppress(RuntimeError):  # closed meanwhile, or the system has no thread left
                    self._pool.submit(self._prefetch, key)

    def keys(self) -> list[KVKey]:
        """Return the keys of all chunks stored in any tier."""
        return list(self.entries())

    def entries(self) -> dict[KVKey, Entry]:
        """Return what is known of each stored chunk, from the fastest tier that holds it."""
        return {
            key: entry
            for tier in reversed(self.tiers)
            for key, entry in _entries_of(tier)
            if not self._is_expired(tier, key, entry)
        }

    def stats(self) -> dict[str, dict[str, int | None]]:
        """Return numbers by tier.

        Returns:
            Under each tier's name: entries, bytes, capacity_bytes, and this process's counts of
            hits, misses, admitted, rejected, refused, evictions, expired, quarantined, errors,
            skipped (reads while it was out), dropped (writes) and queued (chunks not written yet);
            entries and bytes are None where it cannot be asked.
        """
        return {tier.name: tier.stats() for tier in self.tiers}

    def verify(
        self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read every object in durable tiers through, after removing expired ones.

        Args:
            repair: quarantine what is damaged.
            progress: called with objects done and in all.

        Returns:
            How many were read and expired, and which are damaged.
        """
        expired = self.evict_expired()
        durable = [tier for tier in self.tiers if tier.durable]
        todo = [(tier, key) for tier in durable for key, _ in tier.entries()]
        damaged = []
        for done, (tier, key) in enumerate(todo, start=1):
            with self._locks.held(key):
                reason = tier.check(key)
                if reason is not None and repair:
                    tier.quarantine(key, reason)
            if reason is not None:
                damaged.append(DamagedObject(tier.name, key, reason))
            if progress is not None:
                progress(done, len(todo))
        return VerifyReport(len(todo), expired, tuple(damaged))

    def close(self) -> None:
        """Stop reading ahead, write what waits for it and let go of memory.

        The store must not be used afterwards.
        """
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._threads.close()
        for tier in self.tiers:
            tier.drain()
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(READ_ONLY)

    def _entry(self, key: KVKey) -> Entry | None:
        return self._held([key]).get(key)

    def _held(self, keys: Iterable[KVKey]) -> dict[KVKey, Entry]:
        """Return what is known of those chunks that are stored, from the fastest tier of each."""
        missing, held = list(dict.fromkeys(keys)), dict[KVKey, Entry]()
        for tier in self.tiers:
            for key, entry in zip(missing, tier.entry_many(missing), strict=True):
                if entry is not None and not self._is_expired(tier, key, entry):
                    held[key] = entry
            missing = [key for key in missing if key not in held]
        return held

    def _ttl(self, tier: Tier) -> float | None:
        """Return the age at which a tier's copies are gone: its own, the store's, or the lower."""
        given = [s for s in (tier.policy.ttl_seconds, self.ttl_seconds) if s is not None]
        return min(given, default=None)

    def _is_expired(self, tier: Tier, key: KVKey, entry: Entry) -> bool:
        return self._is_past(tier, key, entry.written_at)

    def _is_past(self, tier: Tier, key: KVKey, written_at: float) -> bool:
        """Whether a chunk is past its time; one of no time, or of a later one than now, is, too."""
        ttl_seconds = self._ttl(tier)
        if ttl_seconds is None or key in self._pinned:
            return False
        return not -CLOCK_SKEW_SECONDS <= time.time() - written_at <= ttl_seconds

    def _sweep_now_and_then(self) -> None:
        """Have a part of each near tier looked through, on its own threads, for what is expired."""
        now = time.monotonic()
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        for tier in self.tiers:
            if self._sweeps(tier):
                self._threads.submit(tier.name, partial(self._sweep, tier))

    def _sweeps(self, tier: Tier) -> bool:
        """Whether what is in a tier expires, and may be removed there."""
        return self._ttl(tier) is not None and not tier.policy.read_only

    def _sweep(self, tier: Tier) -> None:
        for key, entry in tier.some_entries():
            if self._is_expired(tier, key, entry):
                self._expire_if_free(tier, key)

    def _expire(self, tier: Tier, key: KVKey) -> bool:
        with self._locks.held(key):
            entry = tier.entry(key)  # looked up again: it may have been stored anew
            return entry is not None and self._is_expired(tier, key, entry) and tier.expire(key)

    def _get_many(self, keys: Iterable[KVKey], promote: bool) -> dict[KVKey, _Got]:
        """Read chunks from the fastest tier of each; under their locks."""
        found = dict.fromkeys(keys, _Got(None, Lookup.missed("not stored")))
        for depth, tier in enumerate(self.tiers):
            missing = [key for key, got in found.items() if got.chunk is None]
            for key, read in zip(missing, self._read(tier, missing), strict=True):
                if isinstance(read, StoreError):
                    found[key] = _Got(None, _missed(tier, read))
                elif read is not None:
                    found[key] = _Got(read, Lookup(None, tier.name, None))
                    if promote:
                        _keep(self.tiers[:depth], key, read)
        return found

    def _read(self, tier: Tier, keys: Sequence[KVKey]) -> list[Read]:
        """Read chunks of one tier that are not past their time to live."""
        gone = self._expire_of(tier, keys)
        read = iter(tier.get_many([key for key in keys if key not in gone]))
        return [None if key in gone else self._in_time(tier, key, next(read)) for key in keys]

    def _in_time(self, tier: Tier, key: KVKey, read: Read) -> Read:
        """Return what was read, unless its sealed time says that it is past it."""
        if isinstance(read, StoredChunk) and self._is_past(tier, key, read.written_at):
            tier.expire(key)
            return None
        return read

    def _expire_of(self, tier: Tier, keys: Sequence[KVKey]) -> set[KVKey]:
        """Remove those of a tier's chunks that are past their time to live.

        Returns those that stay there, since the tier is only read: they are not to be read.
        """
        staying = set[KVKey]()
        if self._ttl(tier) is not None:
            for key, entry in zip(keys, tier.entry_many(keys), strict=True):
                if entry is not None and self._is_expired(tier, key, entry):
                    tier.expire(key)
                    staying |= {key} if tier.policy.read_only else set()
        return staying

    def _see(self, keys: Iterable[KVKey]) -> None:
        """Tell all tiers what is asked for: the fastest have it, the others keep it, too."""
        seen = list(dict.fromkeys(keys))
        for tier in self.tiers:
            tier.see(seen)

    def _is_kept(self, key: KVKey, nbytes: int) -> bool:
        """Whether memory that lacks a chunk would keep it; without memory there is none to ask."""
        memory = [tier for tier in self.tiers if tier.keeps_found and not tier.durable]
        lacking = [tier for tier in memory if not tier.contains(key)]
        return not memory or any(tier.would_take(key, nbytes) for tier in lacking)

    def _note(self, log: AccessLog, keys: Sequence[KVKey]) -> None:
        with suppress(RuntimeError):  # closed meanwhile
            self._pool.submit(log.note, keys)

    def _prefetch(self, key: KVKey) -> None:
        """Read ahead of a request, which will be the chunk's use."""
        if not self.tiers[0].contains(key):
            with self._locks.held(key):
                self._get_many([key], promote=True)

    def _begin_open(self, key: KVKey, way: Way) -> Future[Found]:
        if way.promotes:
            self._see([key])
        return self._opening.begin(key, way)

    def _open_in(self, depth: int, search: Search) -> Found | None:
        """Open a chunk in one tier, or join those who read it there; None where it is not.

        No lock is held while the tier is asked: whoever stores or evicts the chunk meanwhile, in
        this tier or another one, makes the search stale, and nothing of it is kept.
        """
        tier, key, way = self.tiers[depth], search.key, search.way
        shared = self._reading.get((key, way))
        if shared is not None and shared.failure is None and shared.tier == tier.name:
            return Found(shared, None)
        if self._is_gone(tier, key):
            return None
        opened = tier.open(key)
        if opened is None:
            return None
        if isinstance(opened, StoreError):
            missed = _missed(tier, opened)
            return Found(None, missed.reason, missed.tier)
        if self._is_past(tier, key, opened.written_at):  # sealed: the tier told another time
            self._drop_if_free(tier, key)
            return None
        return Found(self._shared(search, depth, opened), None)

    def _is_gone(self, tier: Tier, key: KVKey) -> bool:
        """Whether a tier's chunk is past its time, and remove it then."""
        if self._ttl(tier) is None:
            return False
        entry = tier.entry(key)
        is_gone = entry is not None and self._is_expired(tier, key, entry)
        if is_gone:
            self._expire_if_free(tier, key)
        return is_gone

    def _expire_if_free(self, tier: Tier, key: KVKey) -> None:
        """Remove a chunk that is past its time, unless somebody is at work on it just now."""
        with self._locks.tried(key) as is_held:
            entry = tier.entry(key) if is_held else None  # it may have been stored anew
            if entry is not None and self._is_expired(tier, key, entry):
                tier.expire(key)

    def _drop_if_free(self, tier: Tier, key: KVKey) -> None:
        with self._locks.tried(key) as is_held:
            if is_held:
                tier.expire(key)

    def _shared(self, search: Search, depth: int, reader: ChunkReader) -> SharedChunk:
        """Return what prompts read a chunk through; what is kept of it is kept once it is whole."""
        tier, above = self.tiers[depth], self.tiers[:depth]
        key, way = search.key, search.way
        if isinstance(reader, WholeReader):
            if way.promotes and above:
                self._keep_found(search, depth, StoredChunk(reader.kv, reader.written_at))
            shared = SharedChunk(reader, tier.name, reader.read, unpacks=way.unpacks)
            if not shared.only_unpacks:
                return shared
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
        self._reading[key, way] = shared
        if not self._opening.is_current(search):  # looked at behind it: whoever comes now sees it
            self._reading.pop((key, way), None)
        return shared

    def _keep_found(self, search: Search, depth: int, chunk: StoredChunk) -> None:
        """Keep a chunk in faster tiers, unless it is evicted, replaced or worked on meanwhile."""
        with self._locks.tried(search.key) as is_held:
            if is_held and self._opening.is_current(search):
                _keep(self.tiers[:depth], search.key, chunk)

    def _keep_read(self, key: KVKey, depth: int, reader: ChunkReader, kv: StoredKV) -> None:
        """As _keep_found, for a chunk that was read by its layers."""
        with self._locks.tried(key) as is_held:
            read = [self._reading.get((key, way)) for way in _KEEPING]
            is_current = any(shared is not None and shared.reader is reader for shared in read)
            if is_held and is_current and self.tiers[depth].contains(key):
                _keep(self.tiers[:depth], key, StoredChunk(kv, reader.written_at))

    @contextmanager
    def _changing(self, key: KVKey) -> Iterator[None]:
        """Around what stores or removes a chunk: nobody joins those who read what was there.

        Before it, and behind it once more: who looked meanwhile may have seen either.
        """
        self._part_with(key)
        try:
            yield
        finally:
            self._part_with(key)

    def _part_with(self, key: KVKey) -> None:
        """Let nobody join those who read a chunk that is not the stored one any more."""
        self._opening.part_with([key], _WAYS)
        for way in _WAYS:
            self._reading.pop((key, way), None)


def _put_all(tiers: Sequence[Tier], key: KVKey, chunk: StoredChunk) -> PutResult:
    """Store a chunk in every tier that takes it; returns what came of it."""
    return PutResult.of_tiers(
        [(tier.durable, tier.put(key, chunk)) for tier in tiers if tier.takes_puts]
    )


def _entries_of(tier: Tier) -> Iterator[tuple[KVKey, Entry]]:
    """Go through a tier, beginning with what is on its way: it may have arrived meanwhile."""
    yield from tier.queued()
    yield from tier.entries()


def _keep(tiers: Sequence[Tier], key: KVKey, chunk: StoredChunk) -> None:
    """Keep a chunk that was found below these tiers in those that keep such."""
    for tier in tiers:
        if tier.keeps_found:
            tier.put(key, chunk)


def _missed(tier: Tier, error: StoreError) -> Lookup:
    """Return what an unusable chunk is, or which tier could not be read."""
    reason = miss_of(error)
    return Lookup.missed(reason, tier.name if reason == "store error" else None)


def _time_of(written_at: float | None) -> float:
    """Return when a chunk was first stored: as told, if that can be."""
    now = time.time()
    if written_at is None or not math.isfinite(written_at):
        return now
    return max(written_at, 0.0)


_stores: WeakSet[TieredKVStore] = WeakSet()


def _after_fork() -> None:
    """Have the stores of a process that was forked work there."""
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _sweep_until(store: ReferenceType[TieredKVStore], closing: threading.Event) -> None:
    """Remove what expires in a store that nobody uses, until it is closed, or gone."""
    while not closing.wait(SWEEP_SECONDS):
        there = store()
        if there is None:
            return
        there._sweep_now_and_then()
        del there
