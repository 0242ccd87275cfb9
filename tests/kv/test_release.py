"""Memory that chunk KV takes is freed while the store lives on."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore
from cacheblend_rag.kv.tiers import StoredChunk
from cacheblend_rag.kv.tiers.host import DeviceTier
from tests.kv.samples import make_key, make_kv

KEYS = [make_key(n) for n in range(3)]


def filled(*tiers: HostTier | DiskTier) -> TieredKVStore:
    store = TieredKVStore(tiers)
    for seed, name in enumerate(KEYS):
        assert store.put(name, make_kv(seed))
    return store


def test_what_is_on_disk_is_read_from_there_again(tmp_path: Path) -> None:
    host, device, disk = HostTier(), DeviceTier("cpu"), DiskTier(tmp_path)
    store = filled(device, host, disk)
    held = host.usage().nbytes + device.usage().nbytes
    kept = device.get(KEYS[0])
    assert isinstance(kept, StoredChunk)
    tensor = weakref.ref(kept.kv.keys)
    del kept
    assert store.release() == held > 0
    gc.collect()
    assert tensor() is None
    assert [(tier.usage().entries, tier.usage().nbytes) for tier in (host, device)] == [(0, 0)] * 2
    assert disk.usage().entries == 3
    assert [store.get(name).tier for name in KEYS] == ["disk"] * 3
    assert [store.get(name).tier for name in KEYS] == ["device"] * 3, "memory is filled again"


def test_pinned_chunks_stay() -> None:
    host = HostTier()
    store = filled(host)
    store.pin(KEYS[1])
    nbytes = store.nbytes(KEYS[1])
    assert nbytes
    assert store.release() == 2 * nbytes
    assert store.contains_many(KEYS) == [False, True, False]
    store.unpin(KEYS[1])
    assert store.release() == nbytes
    assert store.release() == 0


def test_a_store_that_is_only_read_releases_its_memory(tmp_path: Path) -> None:
    filled(DiskTier(tmp_path)).close()
    store = TieredKVStore.open(kv_path=tmp_path, read_only=True)
    assert store.get(KEYS[0]).tier == "disk"
    assert store.get(KEYS[0]).tier == "host"
    assert store.release() > 0
    assert store.get(KEYS[0]).tier == "disk"
    with pytest.raises(StoreError):
        store.evict(KEYS[0])
