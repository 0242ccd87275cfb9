"""What one request reads of a chunk is kept for others that have announced to read it."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from cacheblend_rag.kv import HostTier, TieredKVStore, codec
from cacheblend_rag.kv.reading import WantedChunks
from cacheblend_rag.kv.shared_chunk import SharedChunk
from tests.kv.samples import SlowBytes, make_key, make_kv, same, taken

KEY, OTHER = make_key(0), make_key(1)


@pytest.fixture
def far(monkeypatch):
    """A tier that is read by ranges, with two chunks."""
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 10)
    tier = SlowBytes()
    tier.fill({KEY: make_kv(0, tokens=64), OTHER: make_kv(1, tokens=64)})
    return tier


def read(store, *keys):
    with store.fetch(keys or [KEY]) as source:
        return taken(source)


# A read that has ended may be joined until its thread has let go of it, hence ``until``.
def times_read(far, key=KEY):
    """How often all of a chunk's layers were read."""
    return sum(one == key for one, _ in far.ranges) / make_kv(0).keys.shape[0]


@pytest.mark.parametrize("memory", [(), (HostTier(1),)])
def test_a_chunk_is_read_once_for_all_that_announced_it(far, memory):
    """With no memory, and with one that has no room."""
    with TieredKVStore([*memory, far]) as store, ExitStack() as announced:
        for _ in range(3):
            announced.enter_context(store.reads.wanting([KEY]))
        found = [read(store) for _ in range(3)]
        assert times_read(far) == 1
        assert all(same(one.kv, make_kv(0, tokens=64)) for (one,) in found)
        assert {one.tier for (one,) in found} == {"bytes"}


def test_a_replaced_chunk_is_read_anew(far):
    with TieredKVStore([far]) as store, store.reads.wanting([KEY]), store.reads.wanting([KEY]):
        read(store)
        with store.reads.changing(KEY):
            far.fill({KEY: make_kv(5, tokens=64)})
        (found,) = read(store)
        assert same(found.kv, make_kv(5, tokens=64))


def test_an_expired_chunk_is_not_served(far, monkeypatch):
    with (
        TieredKVStore([far], ttl_seconds=3600) as store,
        store.reads.wanting([KEY]),
        store.reads.wanting([KEY]),
    ):
        assert read(store)[0].kv is not None
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 7200)
        assert read(store)[0].kv is None


def test_no_more_is_kept_than_there_is_room_for(far):
    reader = far.open(KEY)
    chunk = SharedChunk(reader, "bytes", reader.read)
    assert chunk.nbytes == make_kv(0, tokens=64).keys.nbytes * 2
    wanted = WantedChunks(limit=2 * chunk.nbytes - 1)
    for _ in range(2):
        wanted.add([KEY, OTHER])
    assert wanted.keep(KEY, chunk)
    assert not wanted.keep(OTHER, SharedChunk(reader, "bytes", reader.read))
    wanted.remove([KEY])
    assert not wanted.keep(OTHER, SharedChunk(reader, "bytes", reader.read))
    wanted.remove([KEY])
    assert wanted.keep(OTHER, SharedChunk(reader, "bytes", reader.read))
