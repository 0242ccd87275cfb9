"""Memory that chunk KV takes is freed while the store lives on."""

from __future__ import annotations

from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore
from tests.kv.samples import make_key, make_kv

KEYS = [make_key(n) for n in range(3)]


def filled(*tiers: HostTier | DiskTier) -> TieredKVStore:
    store = TieredKVStore(tiers)
    for seed, name in enumerate(KEYS):
        assert store.put(name, make_kv(seed))
    return store


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
