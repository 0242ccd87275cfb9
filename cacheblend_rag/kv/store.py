"""The KV store: chunk KV in several tiers, fastest first, behind one interface."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import torch

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.deletions import Deletions
from cacheblend_rag.kv.expiry import Expiry
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.mac import CHECKSUM, Mac, mac_of
from cacheblend_rag.kv.opening import TierThreads, Way
from cacheblend_rag.kv.reading import SharedReads
from cacheblend_rag.kv.stored_chunk import READ_ONLY, Entry, Lookup, PutResult, StoredChunk
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.kv.tiers.disk import DiskTier
from cacheblend_rag.kv.tiers.urls import open_tiers
from cacheblend_rag.kv.timings import Speeds
from cacheblend_rag.kv.whole_chunks import Prefetch, VerifyReport, WholeChunks, read_through
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import Evicted
from cacheblend_rag.settings import Precision, StoreConfig

FORKED = (
    "the store was opened before this process was forked, and its threads and connections do not"
    " exist here: open it in the process that uses it"
)


class TieredKVStore:
    """Chunk KV under keys, over tiers from fastest to slowest. Safe to share between threads.

    A get tries the tiers in order and copies a found chunk into the faster ones, a put writes to
    all of them; tiers may opt out (``keeps_found``, ``takes_puts``). No method that a request needs
    raises because of storage: damage, a full disk or a foreign file is a miss or a failed put; and
    none lists a tier. Pins exempt a chunk from eviction by capacity and by age: a folder's pins
    hold for all processes that share it, others in this process.

    Args:
        tiers: from fastest to slowest, each with a name of its own.
        ttl_seconds: time after which a stored chunk expires, None is never; a tier's own policy
            may set less.
        precision: to which numbers are rounded when stored, see kv/precision.py.
        mac: the MAC of stored bytes, see kv/mac.py.
        folder: keeps deletions that wait for a tier, see kv/deletions.py; None is that of the first
            disk, if there is one.

    Raises:
        StoreError: when there is no tier, two have one name, or the age is not above 0; and by all
            methods in a process that was forked since.

    Attributes:
        tiers, ttl_seconds, precision, mac: as given.
        reads, prefetching: the running reads of prompts, and the loads ahead of them.
        expiry, locks: removes expired chunks; the locks of chunks in use.
        deletions: those that wait for a tier.
        speeds: recent read speeds of tiers, measured by the readers.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        ttl_seconds: float | None = None,
        precision: Precision = "native",
        mac: Mac = CHECKSUM,
        folder: str | os.PathLike[str] | None = None,
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
        self.precision, self.mac = precision, mac
        for tier in self.tiers:
            tier.join(mac, ttl_seconds)
        disk = next((tier.path for tier in self.tiers if isinstance(tier, DiskTier)), None)
        noted_in = disk if folder is None else Path(folder).expanduser().absolute()
        self.speeds = Speeds()
        self.locks = KeyLocks()
        self._threads = TierThreads(self.tiers)
        self._closing = threading.Event()
        self.deletions = Deletions(noted_in)
        self.expiry = Expiry(self.tiers, self.locks, self.deletions, self._closing)
        self.reads = SharedReads(self.tiers, self.expiry, self.locks, self._threads)
        self._chunks = WholeChunks(self.tiers, self.expiry)
        self.prefetching = Prefetch(self.tiers, self._chunks, self.locks, self._closing)
        _stores.add(self)

    @classmethod
    def open(cls, **settings: Any) -> TieredKVStore:
        """Return the store that the settings of a StoreConfig describe; raises as ``of``.

        Args:
            settings: such as ``host_bytes``, ``kv_path``, ``disk_bytes`` and ``ttl_seconds``.

        Raises:
            ConfigError: when a setting is out of range.
        """
        return cls.of(StoreConfig(**settings))

    @classmethod
    def of(cls, config: StoreConfig, *, device: torch.device | str = "cpu") -> TieredKVStore:
        """Return the store that a StoreConfig describes.

        Args:
            config: where chunk KV is kept.
            device: where the engine computes, and where a device tier keeps chunks.

        Raises:
            StoreError: when there is neither memory nor disk, or a tier cannot be opened.
            MissingExtraError: when a tier's library is not installed.
        """
        return cls(
            open_tiers(config, device),
            ttl_seconds=config.ttl_seconds,
            precision=config.precision,
            mac=mac_of(),
            folder=config.kv_path,
        )

    @property
    def read_only(self) -> bool:
        """Whether a tier is read-only, so that nothing is stored or evicted permanently."""
        return any(tier.policy.read_only for tier in self.tiers)

    def contains(self, key: KVKey) -> bool:
        """Whether any tier holds the chunk; reads no tensors."""
        return self.contains_many([key])[0]

    def contains_many(self, keys: Iterable[KVKey]) -> list[bool]:
        """As contains, for many keys at once: each tier is asked once.

        Returns:
            Whether each is stored, in the order of the keys.
        """
        wanted = list(keys)
        held = self._chunks.held(wanted)
        return [key in held for key in wanted]

    def stored_many(self, keys: Iterable[KVKey]) -> list[bool | None]:
        """As contains_many, while a tier may fail.

        Returns:
            Whether each is stored; None for one that is not found while a tier fails.
        """
        held = self.contains_many(keys)
        absent = None if any(tier.is_failing for tier in self.tiers) else False
        return [there or absent for there in held]

    def get(self, key: KVKey, *, promote: bool = True) -> Lookup:
        """Read one chunk from the fastest tier that has it; the tensors must not be written to.

        ``fetch`` reads a prompt's chunks.

        Args:
            key: the chunk to read.
            promote: copy a chunk found in a slower tier into faster ones that keep such chunks.

        Returns:
            The chunk and its tier, or the reason why there is none.
        """
        if promote:
            self.reads.see([key])
        with self.locks.held(key):
            return self._chunks.get(key, promote=promote)

    def fetch(
        self,
        keys: Iterable[KVKey],
        *,
        promote: bool = True,
        unpack: bool = True,
    ) -> LayerSource:
        """Begin to read chunks layer by layer; returns at once.

        Concurrent reads of the same chunk are shared.

        Args:
            keys: the chunks of one prompt.
            promote: as for get; a chunk is kept once all of its layers were read.
            unpack: whether layers are returned as numbers of the model's type; without it, those of
                a packed chunk are returned as stored.

        Returns:
            The source of the layers; close it unless all are taken.
        """
        return LayerSource(keys, self.reads, Way(promote, unpack))

    def put(self, key: KVKey, kv: ChunkKV, *, in_memory: bool = False) -> PutResult:
        """Store a chunk in every tier that takes puts, fastest first.

        Args:
            key: the name it is stored under.
            kv: the chunk KV; its tensors must not be written to afterwards. For ``int4``, all keys
                must be rotated for position 0.
            in_memory: only in tiers that end with this process.

        Returns:
            A result that is true if any tier stored it, with the reason otherwise. NaN and infinity
            are refused; they occur in models whose activations overflow in 16 bits.

        Raises:
            ValueError: when the tensors differ from ChunkKV's description.
        """
        kv.check_form()
        if not kv.is_finite():
            return PutResult(False, is_finite=False)
        chunk = StoredChunk(kv.packed(self.precision), time.time())
        self.reads.see([key])
        with self.locks.held(key), self.reads.changing(key):
            return PutResult.of_tiers(
                [
                    (tier.durable, tier.put(key, chunk))
                    for tier in self.tiers
                    if tier.takes_puts and not (in_memory and tier.durable)
                ]
            )

    def evict(self, key: KVKey) -> Evicted:
        """Remove a chunk from all tiers, pinned or not; returns 1 if it was stored, else 0.

        A tier that fails is asked again until it has removed what it holds of the chunk, which is
        not read any more.

        Raises:
            StoreError: when the store is read-only: the chunk would come back; or when too many
                deletions wait.
        """
        if self.read_only:
            raise StoreError(READ_ONLY)
        with self.locks.held(key), self.reads.changing(key):
            evicted = {tier.name: tier.evict(key) for tier in self.tiers}
            pending = [name for name, was_there in evicted.items() if was_there is None]
            is_noted = not pending or self.deletions.add(pending, key, time.time())
        return Evicted(int(any(evicted.values())), pending, is_noted=is_noted)

    def forget(self, keys: Iterable[KVKey]) -> None:
        """Remove chunks from this process's memory only: others have evicted them elsewhere.

        Args:
            keys: chunks, stored or not.
        """
        for key in keys:
            with self.locks.held(key), self.reads.changing(key):
                for tier in self.tiers:
                    if not tier.durable:
                        tier.evict(key)

    def release(self) -> int:
        """Free this process's memory of chunk KV; returns how many bytes.

        Chunks in slower tiers stay there, and so do chunks that wait to be written to them, and
        pinned chunks. A chunk that a prompt is reading is freed once it was read. Chunks in no
        other tier are lost, as if they had been evicted.
        """
        return sum(tier.release() for tier in self.tiers)

    def evict_expired(self) -> int:
        """Remove expired copies from all tiers; returns how many; raises as ``entries``."""
        return self.expiry.remove_all()

    def pin(self, *keys: KVKey) -> None:
        """Never evict these chunks for capacity or age, from now on, stored yet or not.

        Raises:
            StoreError: when a folder's pins cannot be written, or are too many.
        """
        for tier in self.tiers:
            tier.pin(*keys)

    def unpin(self, *keys: KVKey) -> None:
        """Undo pin; raises as it."""
        for tier in self.tiers:
            tier.unpin(*keys)

    def pinned(self) -> set[KVKey]:
        """Return the keys that are pinned in any tier, of chunks stored or not."""
        return set[KVKey]().union(*(tier.pinned() for tier in self.tiers))

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Start loading chunks into the fastest tier, as many as fit; returns at once.

        A get for one of them waits for its load. Chunks that memory would turn away are not loaded.
        """
        self.prefetching.begin(keys)

    def keys(self) -> list[KVKey]:
        """Return the keys of all chunks stored in any tier; raises as ``entries``."""
        return list(self.entries())

    def entries(self) -> dict[KVKey, Entry]:
        """Return the entry of each stored chunk, from the fastest tier that holds it.

        Raises:
            StoreError: when a tier cannot be listed.
        """
        return {
            key: entry
            for tier in reversed(self.tiers)
            for key, entry in tier.all_entries()
            if not self.expiry.is_past(tier, key, entry.written_at)
        }

    def stats(self) -> dict[str, dict[str, int | None]]:
        """Return numbers by tier.

        Returns:
            Under each tier's name: entries, bytes (None if it cannot be asked), capacity_bytes, and
            this process's counts: see ``COUNTED`` in kv/tiers/policy.py.
        """
        return {tier.name: tier.stats() for tier in self.tiers}

    def unreadable(self, keys: Iterable[KVKey]) -> Iterator[tuple[KVKey, Reason]]:
        """Read chunks one by one, and yield those that stay stored though they cannot be read.

        Damaged chunks are quarantined when they are read, so they are not yielded.

        Args:
            keys: chunks, stored or not.

        Yields:
            A key and why its chunk cannot be used: a tier fails to read it, or it needs another
            key.
        """
        for key in keys:
            found = self.get(key, promote=False)
            if found.reason is not None and self.contains(key):
                tier = f"{found.tier} tier: " if found.tier else ""
                yield key, Reason(found.reason.code, f"{tier}{found.reason}")

    def verify(
        self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read and check every object in durable tiers, after removing expired ones.

        Args:
            repair: quarantine damaged objects.
            progress: called with the number of objects done and the total.

        Returns:
            How many were read and expired, and which are damaged.
        """
        expired = self.evict_expired()
        checked, damaged = read_through(self.tiers, self.locks, repair=repair, progress=progress)
        return VerifyReport(checked, expired, damaged)

    def close(self) -> None:
        """Stop reading ahead, and free memory.

        The store must not be used afterwards. In a forked process, this leaves it to the parent.
        """
        if isinstance(self, _ParentsStore):
            return
        self._closing.set()
        self.expiry.close()
        self.prefetching.close()
        self._threads.close()
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ParentsStore(TieredKVStore):
    """What a store becomes in a forked process, which has none of its threads.

    Closing it leaves it to the parent; all else raises StoreError.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in ("close", "__class__"):
            return super().__getattribute__(name)
        raise StoreError(FORKED)


_stores: WeakSet[TieredKVStore] = WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store.__class__ = _ParentsStore


os.register_at_fork(after_in_child=_after_fork)
