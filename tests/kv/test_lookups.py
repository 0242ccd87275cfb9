"""What a lookup does when 1,000 chunks are stored and when 20,000 are: counted, the same."""

import os
import shutil
import time
from collections import Counter
from itertools import product

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, KVKey, StoredChunk, TieredKVStore, TierPolicy
from cacheblend_rag.kv.tiers.admission import Sightings
from cacheblend_rag.kv.tiers.disk import SUFFIX

from .samples import make_key, make_kv, same

FEW, MANY = 1_000, 20_000
ASKED = [make_key(number) for number in (5, 500, 999)]
MISSING = make_key(MANY + 1)


@pytest.fixture(scope="module")
def keys():
    return [make_key(number) for number in range(MANY)]


def counted(patch, owner, name):
    """Have calls counted, in the list that is returned."""
    calls, real = [], getattr(owner, name)
    patch.setattr(owner, name, lambda *given: calls.append(1) or real(*given))
    return calls


@pytest.fixture
def touched(monkeypatch):
    """What is asked of the disk, and how often."""
    counts = Counter()

    def counting(name):
        real = getattr(os, name)

        def operation(*arguments, **options):
            counts[name] += 1
            found = real(*arguments, **options)
            counts["names"] += len(found) if name == "listdir" else 0
            return found

        monkeypatch.setattr(os, name, operation)

    for name in ("stat", "open", "listdir", "scandir", "utime"):
        counting(name)
    return counts


def asked(store, touched):
    """What lookups, reads and a miss touch."""
    touched.clear()
    assert store.contains_many([*ASKED, MISSING]) == [True] * 3 + [False]
    for number, lookup in zip((5, 500, 999), store.get_many(ASKED), strict=True):
        assert same(lookup.kv, make_kv(number))
    assert store.get(MISSING).reason == "not stored"
    return dict(touched)


def test_a_disk_is_touched_as_often_whatever_it_holds(tmp_path, touched, keys):
    folder, found = tmp_path / "kv", []
    for first, second in product("0123456789abcdef", repeat=2):
        (folder / first / second).mkdir(parents=True)
    for count in (FEW, MANY):
        for key in keys[:count]:
            with open(f"{folder}/{key.chunk_id[0]}/{key.chunk_id[1]}/{key}{SUFFIX}", "wb"):
                pass
        with TieredKVStore([DiskTier(folder)], ttl_seconds=1e6) as store:
            for number, key in zip((5, 500, 999), ASKED, strict=True):
                assert store.put(key, make_kv(number))
            assert store.stats()["disk"]["entries"] == count
            found.append(asked(store, touched))
            names = touched["names"]
            with store.fetch([MISSING]) as source:
                assert source.take().reason == "not stored"
            assert touched["names"] - names < 2 * count / 256 + 10
    assert found[0] == found[1]
    assert found[0].get("listdir", 0) == found[0].get("scandir", 0) == 0
    shutil.rmtree(folder)


def test_memory_compares_as_few_keys_whatever_it_holds(monkeypatch, touched, keys):
    found = []
    for count in (FEW, MANY):
        tier = HostTier(policy=TierPolicy(10**9))
        small = StoredChunk(make_kv(), time.time())
        for key in keys[:count]:
            assert tier.put(key, small)
        with TieredKVStore([tier]) as store:
            for number, key in zip((5, 500, 999), ASKED, strict=True):
                assert store.put(key, make_kv(number))
            with monkeypatch.context() as patch:
                compared = counted(patch, KVKey, "__eq__")
                assert asked(store, touched) == {}
            found.append(len(compared))
    assert found[1] <= 1.5 * found[0]


def test_a_full_tier_looks_at_as_few_chunks_for_room_whatever_it_holds(monkeypatch, keys):
    looked = []
    for count in (FEW, 20 * FEW):
        chunk = StoredChunk(make_kv(), time.time())
        tier = HostTier(count * chunk.kv.nbytes)
        for key in keys[:count]:
            tier.put(key, chunk)
        with monkeypatch.context() as patch:
            calls = counted(patch, Sightings, "count")
            assert tier.put(MISSING, chunk)
        looked.append(len(calls))
    assert looked[0] == looked[1] < 100
