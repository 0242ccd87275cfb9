"""Page-locked memory: of chunks in the host tier, and of buffers that reads go into.

What locks memory is a stand-in that notes what it was asked; a GPU does it, if there is one.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.page_locked import cuda_memory
from cacheblend_rag.kv.read_memory import LEAST_BYTES, MOST_BYTES, OF_PROCESS, ReadMemory
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers import disk
from tests.kv.locked import PAGE, Locked, tensors
from tests.kv.samples import make_key, make_kv, rounded


@pytest.mark.parametrize("precision", ["native", "fp8", "int4"])
def test_a_chunk_is_kept_in_page_locked_memory_of_its_own(precision: Any) -> None:
    locked = Locked()
    host, kv = HostTier(memory=locked.memory), rounded(make_kv(tokens=40), precision)
    assert host.put(make_key(0), StoredChunk(kv, 0.0))
    kept = host.get(make_key(0)).kv
    for found, wanted in zip(tensors(kept), tensors(kv), strict=True):
        assert locked.has(found)
        assert not locked.has(wanted)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        assert found.data_ptr() % 64 == 0
        assert found.is_contiguous()
    (nbytes,) = locked.pages.values()
    assert kv.nbytes <= nbytes == locked.memory.nbytes < kv.nbytes + PAGE + 4 * 64
    assert host.usage().nbytes == kv.nbytes


def test_memory_is_unlocked_once_nobody_has_the_chunk() -> None:
    locked = Locked()
    host = HostTier(memory=locked.memory)
    host.put(make_key(0), StoredChunk(make_kv(tokens=40), 0.0))
    layer = host.get(make_key(0)).kv.layer(1).numbers
    wanted = layer.clone()
    assert host.evict(make_key(0))
    gc.collect()
    assert len(locked.pages) == 1, "a prompt is still reading it"
    assert torch.equal(layer, wanted)
    del layer
    gc.collect()
    assert locked.pages == {}
    assert locked.memory.nbytes == 0


def test_beyond_the_limit_chunks_are_in_ordinary_memory() -> None:
    most = -(-(make_kv(tokens=40).nbytes + 3 * 64) // PAGE) * PAGE
    locked = Locked(limit=2 * most - 1)
    host, keys = HostTier(memory=locked.memory), [make_key(index) for index in range(2)]
    for each in keys:
        assert host.put(each, StoredChunk(make_kv(tokens=40), 0.0))
    assert [locked.has(host.get(each).kv.keys) for each in keys] == [True, False]
    assert torch.equal(host.get(keys[1]).kv.keys, make_kv(tokens=40).keys)
    host.evict(keys[0])
    gc.collect()
    assert host.put(keys[0], StoredChunk(make_kv(tokens=40), 0.0))
    assert locked.has(host.get(keys[0]).kv.keys), "there is room again"


def test_where_pages_cannot_be_locked_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    locked = Locked()
    host, keys = HostTier(memory=locked.memory), [make_key(index) for index in range(3)]
    host.put(keys[0], StoredChunk(make_kv(tokens=40), 0.0))
    locked.refuses = True
    with caplog.at_level(logging.WARNING):
        for each in keys[1:]:
            assert host.put(each, StoredChunk(make_kv(tokens=40), 0.0))
    assert [locked.has(host.get(each).kv.keys) for each in keys] == [True, False, False]
    assert len([record for record in caplog.records if "page-locked" in record.message]) == 1
    assert locked.memory.nbytes == sum(locked.pages.values())


def test_a_forked_process_unlocks_nothing() -> None:
    """CUDA does not work there, and the pages are its parent's."""
    locked = Locked()
    host = HostTier(memory=locked.memory)
    host.put(make_key(0), StoredChunk(make_kv(tokens=40), 0.0))
    locked.is_there = False
    host.close()
    gc.collect()
    assert len(locked.pages) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_a_chunk_page_locked() -> None:
    torch.zeros(1, device="cuda")
    host = HostTier()
    host.put(make_key(0), StoredChunk(make_kv(tokens=40), 0.0))
    kept = host.get(make_key(0)).kv
    assert all(layer.is_pinned() for layer in kept.keys)
    before = cuda_memory().nbytes
    assert before > 0
    del kept
    host.close()
    gc.collect()
    assert cuda_memory().nbytes < before


# Buffers of reads


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
    assert OF_PROCESS.room(1 << 20) is cuda_memory().copied(make_kv(tokens=40)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_was_read_page_locked(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    tier = DiskTier(tmp_path)
    tier.put(make_key(0), StoredChunk(large_kv(), 0.0))
    numbers = tier.open(make_key(0)).read(1, 2).numbers
    assert numbers.is_pinned()
    assert torch.equal(numbers.cuda().cpu()[0], large_kv().numbers[1])
