"""Page-locked buffers for reads: reused once nothing refers to them, and never kept by a tier."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.read_memory import (
    LEAST_BYTES,
    MOST_BYTES,
    ReadMemory,
    cuda_read_memory,
)
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers import bytes as bytes_tier
from tests.kv.locked import Locked
from tests.kv.samples import make_key


def large_kv(start: float = 0.0) -> ChunkKV:
    """A chunk of six layers of 1 MiB."""
    numbers = torch.arange(6 << 18, dtype=torch.float32).view(6, 2, 4, 256, 128) + start
    return ChunkKV(numbers[:, 0], numbers[:, 1], 0)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    """The tiers of bytes read for this device."""
    device = Locked()
    memory = ReadMemory(device.memory)
    monkeypatch.setattr(bytes_tier, "cuda_read_memory", lambda: memory)
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


def test_a_buffer_is_not_used_for_much_less() -> None:
    locked = Locked()
    memory = ReadMemory(locked.memory)
    large, address = memory.room(4 << 20), 0
    assert large is not None
    address = large.data_ptr()
    del large
    small = memory.room(1 << 20)
    assert small is not None
    assert small.data_ptr() != address


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


def test_where_nothing_can_be_locked_reads_get_ordinary_memory(locked: Locked) -> None:
    locked.refuses = True
    room = bytes_tier.room_for(1 << 20)
    assert room.numel() == 1 << 20
    assert not locked.has(room)


def test_a_buffer_of_before_a_fork_is_not_written_to_again() -> None:
    locked = Locked()
    memory = ReadMemory(locked.memory)
    before = memory.room(1 << 20)
    assert before is not None
    memory.forking()
    del before
    gc.collect()
    assert memory.room(1 << 20) is not None
    assert len(locked.pages) == 1, "the other one was unlocked"


def test_chunks_are_read_from_disk_into_buffers(locked: Locked, tmp_path: Path) -> None:
    tier, kv = DiskTier(tmp_path), large_kv()
    assert tier.put(make_key(0), StoredChunk(kv, 0.0))
    reader = tier.open(make_key(0))
    layers = reader.read(2, 4)
    for index, (keys, values) in enumerate(layers, start=2):
        assert locked.has(keys)
        assert locked.has(values)
        assert torch.equal(keys, kv.keys[index])
        assert torch.equal(values, kv.values[index])


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_a_memory_tier_copies_chunks_out_of_buffers(
    locked: Locked, tmp_path: Path, limit: int
) -> None:
    """With page-locked memory of its own, and without: the buffer is free for the next read."""
    own = Locked(limit=limit)
    tiers = [HostTier(None, memory=own.memory), DiskTier(tmp_path)]
    for index in range(3):
        tiers[1].put(make_key(index), StoredChunk(large_kv(index), 0.0))
    with TieredKVStore(tiers) as store:
        for index in range(3):
            assert store.get(make_key(index)) is not None
        gc.collect()
        assert len(locked.pages) == 1
        for index in range(3):
            kept = tiers[0].get(make_key(index)).kv
            assert not locked.has(kept.keys)
            assert torch.equal(kept.values, large_kv(index).values)


def test_this_process_locks_nothing_before_it_uses_a_gpu() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    assert cuda_read_memory().room(1 << 20) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_noted() -> None:
    memory = cuda_read_memory()
    forks = memory._forks
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert memory._forks == forks + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_was_read_page_locked(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    tier = DiskTier(tmp_path)
    tier.put(make_key(0), StoredChunk(large_kv(), 0.0))
    keys, values = tier.open(make_key(0)).read(1, 2)[0]
    assert keys.is_pinned()
    assert values.is_pinned()
    assert torch.equal(keys.cuda().cpu(), large_kv().keys[1])
