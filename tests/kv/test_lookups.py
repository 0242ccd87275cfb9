"""What a lookup does when 1,000 chunks are stored and when 20,000 are: counted, the same."""

import os
import shutil
from collections import Counter
from itertools import product

import pytest

from cacheblend_rag.kv import DiskTier, TieredKVStore
from cacheblend_rag.kv.tiers.disk import SUFFIX

from .samples import make_key, make_kv, same

FEW, MANY = 1_000, 20_000
ASKED = [make_key(number) for number in (5, 500, 999)]
MISSING = make_key(MANY + 1)


@pytest.fixture(scope="module")
def keys():
    return [make_key(number) for number in range(MANY)]


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
