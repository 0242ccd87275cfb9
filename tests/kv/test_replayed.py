"""An older object of a chunk that somebody puts back is not served past its time."""

import struct
import time

import pytest

from cacheblend_rag.kv import StoredChunk, TieredKVStore
from cacheblend_rag.kv.mac import KeyedMac
from cacheblend_rag.kv.tiers.bytes import path_of
from cacheblend_rag.settings.base import Secret
from tests.kv.samples import make_key, make_kv
from tests.servers import redis_name, redis_place, s3_place, tier_at

KEY = make_key(1)


class Redis:
    """A tier in Redis, and its objects as a stranger sees them."""

    def __init__(self, tmp_path, request):
        self.tier = tier_at(redis_place(request.getfixturevalue("redis")))

    def read(self):
        return self.tier.client.get(redis_name(self.tier, KEY))

    def write(self, data):
        now = struct.pack("<d", time.time())
        self.tier.client.set(redis_name(self.tier, KEY), now + data[len(now) :])


class S3:
    """A tier in a bucket."""

    path = path_of(KEY)

    def __init__(self, tmp_path, request):
        place = s3_place(request.getfixturevalue("s3"))
        self.tier, self.direct = tier_at(place), tier_at(place).store

    def read(self):
        return bytes(self.direct.get(self.path).bytes())

    def write(self, data):
        self.direct.put(self.path, data, attributes={"writtenat": repr(time.time())})


class Disk:
    """A tier in a folder."""

    def __init__(self, tmp_path, request):
        self.tier = tier_at(f"disk://{tmp_path}")
        self.path = self.tier.path / path_of(KEY)

    def read(self):
        return self.path.read_bytes()

    def write(self, data):
        self.path.write_bytes(data)


@pytest.mark.parametrize("kind", [Redis, S3, Disk])
def test_with_a_key_an_older_object_is_as_old_as_it_says_itself(kind, tmp_path, request):
    """Whatever time is recorded beside it."""
    place, mac = kind(tmp_path, request), KeyedMac(Secret("a key of the store's"))
    with TieredKVStore([place.tier], mac=mac) as store:
        assert place.tier.put(KEY, StoredChunk(make_kv(1), time.time() - 3600))
        old = place.read()
        assert store.put(KEY, make_kv(9))
        place.tier.ttl_seconds = 60
        place.write(old)
        with store.fetch([KEY]) as source:
            assert source.take().reason == "not stored"
