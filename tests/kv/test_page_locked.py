"""Chunks of the host tier in page-locked memory: theirs alone, bounded, and freed with them.

What locks memory is a stand-in that notes what it was asked; a GPU does it, if there is one.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from cacheblend_rag.kv import HostTier
from cacheblend_rag.kv.page_locked import cuda_memory
from cacheblend_rag.kv.stored_chunk import StoredChunk
from tests.kv.locked import PAGE, Locked, tensors
from tests.kv.samples import make_key, make_kv, rounded


@pytest.mark.parametrize("precision", ["native", "fp8"])
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


def test_without_a_device_nothing_is_copied() -> None:
    locked = Locked()
    locked.is_there = False
    host, kv = HostTier(memory=locked.memory), make_kv(tokens=40)
    host.put(make_key(0), StoredChunk(kv, 0.0))
    assert locked.pages == {}
    assert host.get(make_key(0)).kv.keys.data_ptr() == kv.keys.data_ptr()


def test_a_forked_process_unlocks_nothing() -> None:
    """CUDA does not work there, and the pages are its parent's."""
    locked = Locked()
    host = HostTier(memory=locked.memory)
    host.put(make_key(0), StoredChunk(make_kv(tokens=40), 0.0))
    locked.is_there = False
    host.close()
    gc.collect()
    assert len(locked.pages) == 1


def test_this_process_locks_nothing_before_it_uses_a_gpu() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    assert cuda_memory().copied(make_kv(tokens=40)) is None


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
