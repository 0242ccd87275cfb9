"""Chunk KV in this process's memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
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
        self._chunks: OrderedDict[KVKey, _Kept] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield the chunks held when called."""
        with self._lock:
            return iter([(key, kept.entry) for key, kept in self._chunks.items()])

    def some_entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """As for any tier: all there are."""
        return self.entries()

    def has_relative(self, key: KVKey) -> bool:
        """As for any tier; compares the keys that are held."""
        with self._lock:
            return any(key.is_relative(other) for other in self._chunks)

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
            self._nbytes = 0

    def would_take(self, key: KVKey, nbytes: int) -> bool:
        """As for any tier: it fits, or is requested more often than those it would displace."""
        with self._lock, suppress(RefusedError):
            self._victims(key, nbytes)
            return True
        return False

    def _entry(self, key: KVKey) -> Entry | None:
        with self._lock:
            kept = self._chunks.get(key)
        return None if kept is None else kept.entry

    def _open(self, key: KVKey) -> WholeReader | None:
        with self._lock:
            kept = self._chunks.get(key)
        return None if kept is None else WholeReader(kept.kv, kept.entry.written_at)

    def _mark_used(self, key: KVKey) -> None:
        with self._lock:
            if (kept := self._chunks.get(key)) is not None:  # not dropped meanwhile
                self._chunks.move_to_end(key)
                kept.entry = replace(kept.entry, used_at=time.time())

    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        self._capacity.check_fits(chunk.kv.nbytes)  # before copying: a refusal costs nothing
        kv = self._own(chunk.kv)
        with self._lock:
            victims = self._victims(key, kv.nbytes)
            for other in (key, *victims):
                self._discard(other)
            self._capacity.count(victims)
            self._chunks[key] = _Kept(kv, Entry(kv.nbytes, chunk.written_at, time.time()))
            self._nbytes += kv.nbytes

    def _own(self, kv: ChunkKV) -> ChunkKV:
        locked = self._memory.copied(kv) if self.device.type == "cpu" else None
        return compact(kv, self.device) if locked is None else locked

    def _drop(self, key: KVKey) -> bool:
        with self._lock:
            return self._discard(key)

    def _discard(self, key: KVKey) -> bool:
        kept = self._chunks.pop(key, None)
        self._nbytes -= 0 if kept is None else kept.kv.nbytes
        return kept is not None

    def _victims(self, key: KVKey, nbytes: int) -> list[KVKey]:
        """Return the chunks to evict so that ``nbytes`` fit in place of ``key``."""
        own = self._chunks.get(key)
        held, known = self._nbytes - (own.kv.nbytes if own else 0), len(self._chunks)
        order = (
            Resident(other, kept.kv.nbytes)
            for other, kept in self._chunks.items()
            if other != key and other not in self._pinned
        )
        return self._capacity.victims(key, nbytes, Usage(known, held), order)


@dataclass
class _Kept:
    """A chunk in memory, and what is known of it."""

    kv: ChunkKV
    entry: Entry


def compact(kv: ChunkKV, device: torch.device | str = "cpu") -> ChunkKV:
    """Return ``kv`` on a device, copied if its storage is larger than the chunk itself."""

    def own(tensor: Tensor) -> Tensor:
        moved = tensor.detach().to(device)
        fits = moved.untyped_storage().nbytes() <= moved.nbytes + SLACK_BYTES
        if fits and moved[0].is_contiguous():
            return moved
        return moved.clone(memory_format=torch.contiguous_format)

    return kv.mapped(own)


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
