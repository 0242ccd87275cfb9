"""Page-locked buffers for reads: reused once nothing refers to them, and never kept by a tier."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.read_memory import LEAST_BYTES, MOST_BYTES, OF_PROCESS, ReadMemory
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers import disk
from tests.kv.locked import Locked, tensors
from tests.kv.samples import make_key, rounded


def large_kv(start: float = 0.0, *, prior: bool = False) -> ChunkKV:
    """A chunk of six layers of 1 MiB, 8,192 tokens."""
    numbers = torch.arange(6 << 18, dtype=torch.float32).view(6, 2, 4, 8192, 4) + start
    return ChunkKV(numbers, 0, torch.ones(8192) if prior else None)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    """Disks are read for this device."""
    device = Locked()
    memory = ReadMemory(device.memory)
    monkeypatch.setattr(disk, "OF_PROCESS", memory)
    return device


def test_a_buffer_is_used_again_once_no_tensor_is_in_it() -> None:
    locked = Locked()
    memory = ReadMemory(locked.memory)
    first = memory.room(1 << 20)
    assert first is not None
    assert locked.has(first)
    part, address = first.view(torch.float32)[5:9], first.data_ptr()
    del first
    other = memory.room(1 << 20)
    assert other is not None
    assert other.data_ptr() != address, "a tensor is still in it"
    del part
    again = memory.room((1 << 20) - 100)
    assert again is not None
    assert again.data_ptr() == address
    assert again.numel() == (1 << 20) - 100
    assert len(locked.pages) == 2


def test_buffers_stay_within_the_limit_used_or_not() -> None:
    locked = Locked(limit=5 << 20)
    memory = ReadMemory(locked.memory)
    first = memory.room(4 << 20)
    assert first is not None
    assert memory.room(1 << 20) is None
    del first
    kept = [memory.room(1 << 20) for _ in range(4)]
    assert all(buffer is not None for buffer in kept), "free buffers of other sizes are given up"
    assert memory.room(1 << 20) is None
    assert locked.memory.nbytes <= 5 << 20


def test_free_buffers_are_released() -> None:
    locked = Locked()
    memory = ReadMemory(locked.memory)
    kept, free = memory.room(1 << 20), memory.room(2 << 20)
    del free
    assert 2 << 20 < memory.release() < 3 << 20
    assert len(locked.pages) == 1
    assert memory.release() == 0
    del kept
    assert memory.release() > 1 << 20
    assert locked.pages == {}


@pytest.mark.parametrize("nbytes", [0, LEAST_BYTES - 1, MOST_BYTES + 1])
def test_small_and_huge_reads_get_ordinary_memory(nbytes: int) -> None:
    locked = Locked()
    assert ReadMemory(locked.memory).room(nbytes) is None
    assert locked.pages == {}


def test_where_nothing_can_be_locked_reads_get_ordinary_memory(
    locked: Locked, tmp_path: Path
) -> None:
    locked.refuses = True
    tier = DiskTier(tmp_path)
    tier.put(make_key(0), StoredChunk(large_kv(), 0.0))
    numbers = tier.open(make_key(0)).read(1, 2).numbers
    assert torch.equal(numbers[0], large_kv().numbers[1])
    assert not locked.has(numbers)


def test_a_forked_process_shares_no_buffer() -> None:
    """So what is read into one later is read where the device looks."""
    locked = Locked()
    kept = ReadMemory(locked.memory).room(1 << 20)
    assert kept is not None
    if not (child := os.fork()):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        kept[0].item()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    kept.fill_(1)


def test_chunks_are_read_from_disk_into_buffers(locked: Locked, tmp_path: Path) -> None:
    tier, kv = DiskTier(tmp_path), large_kv()
    assert tier.put(make_key(0), StoredChunk(kv, 0.0))
    reader = tier.open(make_key(0))
    numbers = reader.read(2, 4).numbers
    assert locked.has(numbers)
    assert torch.equal(numbers, kv.numbers[2:4])


@pytest.mark.parametrize("form", ["native", "fp8"])
@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_a_memory_tier_copies_chunks_out_of_buffers(
    locked: Locked, tmp_path: Path, limit: int, form: Any
) -> None:
    """With page-locked memory of its own, and without: the buffer is free for the next read."""
    own = Locked(limit=limit)
    tiers = [HostTier(None, memory=own.memory), DiskTier(tmp_path)]
    stored = [rounded(large_kv(index, prior=True), form) for index in range(3)]
    for index, kv in enumerate(stored):
        tiers[1].put(make_key(index), StoredChunk(kv, 0.0))
    with TieredKVStore(tiers) as store:
        for index in range(3):
            assert store.get(make_key(index)) is not None
        gc.collect()
        assert len(locked.pages) == 1
        for index in range(3):
            kept = tiers[0].get(make_key(index)).kv
            for one, other in zip(tensors(kept), tensors(stored[index]), strict=True):
                assert not locked.has(one)
                assert torch.equal(one, other)


def test_this_process_locks_nothing_before_it_uses_a_gpu() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    assert OF_PROCESS.room(1 << 20) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_was_read_page_locked(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    tier = DiskTier(tmp_path)
    tier.put(make_key(0), StoredChunk(large_kv(), 0.0))
    numbers = tier.open(make_key(0)).read(1, 2).numbers
    assert numbers.is_pinned()
    assert torch.equal(numbers.cuda().cpu()[0], large_kv().numbers[1])
