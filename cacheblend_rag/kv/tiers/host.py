"""Chunk KV in this process's memory."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.page_locked import SLACK_BYTES, PageLockedMemory, cuda_memory
from cacheblend_rag.kv.reader import WholeReader
from cacheblend_rag.kv.stored_chunk import Entry, StoredChunk
from cacheblend_rag.kv.tiers.admission import RefusedError, Resident
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.kv.tiers.policy import TierPolicy, Usage


class HostTier(Tier):
    """Chunk KV as CPU tensors; the least requested chunks are evicted first.

    Where this process uses a GPU, they are copied into page-locked memory, which the GPU reads.
    Otherwise, and beyond its limit, tensors are kept without a copy if they are on the CPU, each
    layer contiguous, and not part of a larger storage. Callers must not write into tensors that
    they get or put. memory: page-locked memory; by default this process's own.
    """

    durable: ClassVar[bool] = False
    entries_at_once: ClassVar[int] = 1
    reads_at_once: ClassVar[int] = 1

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        name: str = "host",
        policy: TierPolicy | None = None,
        memory: PageLockedMemory | None = None,
    ) -> None:
        super().__init__(name, capacity_bytes, policy=policy)
        self._memory = memory or cuda_memory()
        self.device = torch.device("cpu")
        self._chunks: OrderedDict[KVKey, StoredChunk] = OrderedDict()
        self._used_at: dict[KVKey, float] = {}
        self._of_chunk: defaultdict[str, set[KVKey]] = defaultdict(set)
        self._nbytes = 0
        self._lock = threading.Lock()

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield the chunks held when called."""
        with self._lock:
            found = [(key, self._known(key)) for key in self._chunks]
        return ((key, entry) for key, entry in found if entry is not None)

    def some_entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """As for any tier: all there are."""
        return self.entries()

    def has_relative(self, key: KVKey) -> bool:
        """As for any tier; reads the keys of this chunk only."""
        with self._lock:
            return any(key.is_relative(other) for other in self._of_chunk.get(key.chunk_id, ()))

    def usage(self) -> Usage:
        """Return what is held: tensor bytes."""
        with self._lock:
            return Usage(len(self._chunks), self._nbytes)

    def release(self) -> int:
        """Drop all chunks that are not pinned; returns their bytes."""
        with self._lock:
            before, gone = self._nbytes, [key for key in self._chunks if key not in self._pinned]
            for key in gone:
                self._discard(key)
            freed = before - self._nbytes
        self._counts.add("evictions", len(gone))
        return freed

    def close(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._chunks.clear()
            self._used_at.clear()
            self._of_chunk.clear()
            self._nbytes = 0

    def _entry(self, key: KVKey) -> Entry | None:
        with self._lock:
            return self._known(key)

    def _known(self, key: KVKey) -> Entry | None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return None
        return Entry(chunk.kv.nbytes, chunk.written_at, self._used_at[key])

    def _open(self, key: KVKey) -> WholeReader | None:
        with self._lock:
            chunk = self._chunks.get(key)
        return None if chunk is None else WholeReader(chunk.kv, chunk.written_at)

    def _mark_used(self, key: KVKey) -> None:
        with self._lock:
            if key in self._chunks:  # not dropped meanwhile
                self._chunks.move_to_end(key)
                self._used_at[key] = time.time()

    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        self._capacity.check_fits(chunk.kv.nbytes)  # before copying: a refusal costs nothing
        kept = StoredChunk(self._own(chunk.kv), chunk.written_at)
        with self._lock:
            self._make_room(key, kept.kv.nbytes)
            self._discard(key)
            self._chunks[key] = kept
            self._of_chunk[key.chunk_id].add(key)
            self._used_at[key] = time.time()
            self._nbytes += kept.kv.nbytes

    def _own(self, kv: ChunkKV) -> ChunkKV:
        locked = self._memory.copied(kv) if self.device.type == "cpu" else None
        return compact(kv, self.device) if locked is None else locked

    def _drop(self, key: KVKey) -> bool:
        with self._lock:
            return self._discard(key)

    def _discard(self, key: KVKey) -> bool:
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        del self._used_at[key]
        self._of_chunk[key.chunk_id].discard(key)
        if not self._of_chunk[key.chunk_id]:
            del self._of_chunk[key.chunk_id]
        self._nbytes -= chunk.kv.nbytes
        return True

    def would_take(self, key: KVKey, nbytes: int) -> bool:
        """As for any tier: it fits, or is requested more often than those it would displace."""
        with self._lock, suppress(RefusedError):
            self._victims(key, nbytes)
            return True
        return False

    def _make_room(self, key: KVKey, nbytes: int) -> None:
        """Evict until ``nbytes`` more fit in place of ``key``; refuse before evicting in vain."""
        victims = self._victims(key, nbytes)
        for victim in victims:
            self._discard(victim)
        self._capacity.count(victims)

    def _victims(self, key: KVKey, nbytes: int) -> list[KVKey]:
        excess, held = self._excess(key, nbytes), len(self._chunks)
        return self._capacity.victims(key, self._evictable(key), excess=excess, held=held)

    def _excess(self, key: KVKey, nbytes: int) -> int:
        """Return the bytes over capacity once ``nbytes`` replace ``key``."""
        own = self._chunks.get(key)
        return self._capacity.excess(self._nbytes - (own.kv.nbytes if own else 0) + nbytes)

    def _evictable(self, key: KVKey) -> Iterator[Resident]:
        for other, chunk in self._chunks.items():
            if other != key and other not in self._pinned:
                yield Resident(other, chunk.kv.nbytes)


def compact(kv: ChunkKV, device: torch.device | str = "cpu") -> ChunkKV:
    """Return ``kv`` on a device, copied if its storage is larger than the chunk itself."""
    used = Counter[int]()

    def note(tensor: Tensor) -> Tensor:
        used[tensor.untyped_storage().data_ptr()] += tensor.nbytes
        return tensor

    kv.mapped(note)
    return kv.mapped(partial(_own, device=device, used=used))


def _own(tensor: Tensor, *, device: torch.device | str, used: Mapping[int, int]) -> Tensor:
    """used: bytes of the chunk's tensors in each storage, by its address."""
    storage, tensor = tensor.untyped_storage(), tensor.detach().to(device)
    fits = storage.nbytes() <= used[storage.data_ptr()] + SLACK_BYTES
    if fits and tensor[0].is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class DeviceTier(HostTier):
    """As HostTier, on the device where the engine computes.

    device: where tensors are kept; a chunk from elsewhere is copied there.
    """

    def __init__(
        self,
        device: torch.device | str,
        capacity_bytes: int | None = None,
        *,
        name: str = "device",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(capacity_bytes, name=name, policy=policy)
        self.device = torch.device(device)
