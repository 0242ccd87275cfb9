"""The promises of docs/storage.md: what a request gets of a tier in each state that it can be in.

``PROMISES`` has one row for each state and tier, and says why where there is no such state. The
table of the documentation is compared with it.
"""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from cacheblend_rag.kv import HostTier, TieredKVStore
from cacheblend_rag.kv.mac import KeyedMac
from cacheblend_rag.kv.tiers import breaker
from cacheblend_rag.kv.tiers import disk as disk_module
from cacheblend_rag.settings.secret import Secret
from tests.kv.samples import make_key, make_kv, same, taken
from tests.local_servers import redis_server
from tests.servers import Proxy, RedisNames, redis_place, s3_place, tier_at

NEAR, FAR, NEW = (make_key(number) for number in range(3))
STATES = ["dead", "slow", "dripping", "full", "forged", "replayed", "expired"]
TIERS = ["redis", "s3", "disk"]

# What a request is told of a chunk that only this tier has, by state and tier: the reason, and the
# words of the log; or why there is no such state.
PROMISES = {
    ("dead", "redis"): ("store error", "could not read"),
    ("dead", "s3"): ("store error", "could not read"),
    ("dead", "disk"): ("store error", "could not read"),
    ("slow", "redis"): ("store error", "could not read"),
    ("slow", "s3"): ("store error", "did not arrive within"),
    ("slow", "disk"): (None, "took"),
    ("dripping", "redis"): ("store error", "could not read"),
    ("dripping", "s3"): ("store error", "did not arrive within"),
    ("dripping", "disk"): "a file system answers a read as a whole: see slow",
    ("full", "redis"): ("not stored", "no memory left"),
    ("full", "s3"): "an object store has no room of its own that could end",
    ("full", "disk"): ("not stored", "No space left"),
    ("forged", "redis"): ("damaged", "quarantined"),
    ("forged", "s3"): ("damaged", "quarantined"),
    ("forged", "disk"): ("damaged", "quarantined"),
    ("replayed", "redis"): ("not stored", ""),
    ("replayed", "s3"): ("not stored", ""),
    ("replayed", "disk"): ("not stored", ""),
    ("expired", "redis"): ("not stored", ""),
    ("expired", "s3"): ("not stored", ""),
    ("expired", "disk"): ("not stored", ""),
}
ROWS = [
    pytest.param(
        state,
        tier,
        id=f"{state}-{tier}",
        marks=[pytest.mark.skip(reason=told)] if isinstance(told, str) else [],
    )
    for (state, tier), told in PROMISES.items()
]


class Redis:
    """A tier in a Redis of its own, behind a proxy."""

    def __init__(self, tmp_path, request):
        self.server = request.getfixturevalue("own_redis")
        self.proxy = Proxy(self.server.port)
        place = redis_place(self.server, "timeout=3s")
        self.tier = tier_at(place.replace(f":{self.server.port}/", f":{self.proxy.port}/"))

    def die(self):
        self.server.kill()

    def be_slow(self):
        self.proxy.delay = 60.0
        self.tier.client.connection_pool.disconnect()  # it is waited for once a connection

    def fill_up(self, monkeypatch):
        self.tier.client.config_set("maxmemory", "1mb")

    def read(self, key):
        return self.tier.client.get(RedisNames(self.tier).value(key))

    def write(self, key, data):
        names = RedisNames(self.tier)
        self.tier.client.set(names.value(key), data)
        self.tier.client.hset(names.about, str(key), f"{len(data)} {time.time()}")


class S3:
    """A tier in a bucket, behind a proxy."""

    def __init__(self, tmp_path, request):
        server = request.getfixturevalue("s3")
        self.proxy, place = Proxy(server.port), s3_place(server)
        head, _, tail = place.partition("endpoint=")
        rest = tail.partition("&")[2]
        self.tier = tier_at(f"{head}endpoint={self.proxy.address}&timeout=3s&{rest}")
        self.direct = tier_at(place).store

    def die(self):
        self.proxy.cut_after = 0

    def be_slow(self):
        self.proxy.delay = 60.0

    def read(self, key):
        return bytes(self.direct.get(self._path(key)).bytes())

    def write(self, key, data):
        self.direct.put(self._path(key), data, attributes={"writtenat": repr(time.time())})
        self.tier._times.clear()

    def _path(self, key):
        return f"{key.chunk_id[:2]}/{key}.safetensors"


class Disk:
    """A tier in a folder."""

    proxy = None

    def __init__(self, tmp_path, request):
        self.monkeypatch, self.folder = request.getfixturevalue("monkeypatch"), tmp_path
        self.tier = tier_at(f"disk://{tmp_path}?timeout=0.5s")

    def die(self):
        def refuse(path, *options, **more):
            if str(path).endswith(".safetensors"):
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *options, **more)

        real = os.open
        self.monkeypatch.setattr(os, "open", refuse)

    def be_slow(self):
        real, self.go_on = disk_module.read_range, threading.Event()

        def read_range(*told, **more):
            self.go_on.wait(20)
            return real(*told, **more)

        self.monkeypatch.setattr(disk_module, "read_range", read_range)

    def fill_up(self, monkeypatch):
        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "writev", refuse)

    def read(self, key):
        return Path(disk_module.file_of(self.tier.path, key)).read_bytes()

    def write(self, key, data):
        Path(disk_module.file_of(self.tier.path, key)).write_bytes(data)


PLACES = {"redis": Redis, "s3": S3, "disk": Disk}


@pytest.fixture
def own_redis():
    with redis_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _tried_late(monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_SECONDS", 60.0)


def begin(state, place, store, monkeypatch):
    """Bring the tier into a state; the chunk FAR was put into it before."""
    if state == "dead":
        place.die()
    elif state == "slow":
        place.be_slow()
    elif state == "dripping":
        place.proxy.drips = True
    elif state == "full":
        store.evict(FAR)
        place.fill_up(monkeypatch)
        assert store.put(FAR, make_kv(1, tokens=20_000)), "memory has it"
        store.tiers[0].evict(FAR)
    elif state == "forged":
        place.write(FAR, b"x" * 4096)
    elif state == "replayed":
        old = place.read(FAR)
        store.put(FAR, make_kv(9))
        store.tiers[0].evict(FAR)
        place.tier.ttl_seconds = 60
        place.write(FAR, old)  # with a time of today beside it
    elif state == "expired":
        place.tier.ttl_seconds = 60


@pytest.mark.parametrize(("state", "tier"), ROWS)
def test_what_a_request_gets(state, tier, tmp_path, request, monkeypatch, caplog):
    reason, words = PROMISES[state, tier]
    place = PLACES[tier](tmp_path, request)
    mac = KeyedMac(Secret("a key of the store's"))
    store = TieredKVStore([HostTier(None), place.tier], mac=mac)
    long_ago = time.time() - 3600 if state in ("replayed", "expired") else None
    assert store.put(FAR, make_kv(1), written_at=long_ago)
    assert store.put(NEAR, make_kv())
    store.tiers[0].evict(FAR)
    begin(state, place, store, monkeypatch)
    with store.fetch([FAR]) as far:
        with store.fetch([NEAR]) as near:
            assert near.wait(10), "what memory has is waited for by nobody"
            assert same(taken(near)[0].kv, make_kv())
        if state == "slow" and tier == "disk":
            assert not far.wait(1), "a file is waited for: its reading cannot be given up"
            place.go_on.set()
        assert far.wait(20), "for no longer than the tier's timeout"
        (found,) = taken(far)
    told = tier if reason == "store error" else found.tier
    assert (found.reason, found.tier) == (reason, told)
    if reason is None:
        assert same(found.kv, make_kv(1))
    assert words in caplog.text
    if state in ("dead", "slow", "dripping"):
        assert place.tier.is_failing
        with store.fetch([FAR, NEAR]) as after:
            assert after.wait(10)
            assert same(taken(after)[1].kv, make_kv())
    assert store.put(NEW, make_kv(2)), "memory takes it, whatever becomes of the tier"
    store.close()
    if place.proxy is not None:
        place.proxy.close()


def test_the_documentation_has_the_table():
    text = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    _, _, section = text.partition("## What tiers promise")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    told = {(row[0], tier.lower()): row for row in rows for tier in row[1].split(", ")}
    for row, promise in PROMISES.items():
        if isinstance(promise, str):
            assert row not in told
        else:
            assert ("the chunk" if promise[0] is None else f"`{promise[0]}`") in told[row][2], row
